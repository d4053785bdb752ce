"""What tests of the native kernels are run with."""

import pytest

try:
    from quire.kernels.cpu import _native
except ImportError:
    _native = None


@pytest.fixture(params=_native.supported_isas() if _native else [])
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set of this machine."""
    return request.param
