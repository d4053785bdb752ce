"""Run a test through both paths of the sampler."""

import pytest

from quire.kernels.native import load_native
from quire.sampling import logprobs, sampler


@pytest.fixture(params=["torch", "native"])
def sampling_path(request, monkeypatch):
    """Sample by torch alone, then with the native kernels where they are built."""
    native = load_native() if request.param == "native" else None
    if request.param == "native" and native is None:
        pytest.skip("the native kernels are not built or turned off by QUIRE_NATIVE=0")
    for module in (sampler, logprobs):
        monkeypatch.setattr(module, "load_native", lambda: native)
    return request.param
