import tempfile

import pytest

from tests.e2e.server_process import serving
from tests.e2e.tooled_model import KEY, MAX_BODY_BYTES, make_tooled_model


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """One server that tests share; a test that harms it must make its own."""
    with serving("--data-dir", str(tmp_path_factory.mktemp("data")), "--complete-json-within-max-tokens") as running:
        yield running


@pytest.fixture(scope="session")
def tooled_server(tmp_path_factory):
    """One server with a key whose chat template knows tools; bodies are limited so that one over it is quickly sent."""
    model = make_tooled_model(tmp_path_factory.mktemp("model"))
    data = tmp_path_factory.mktemp("data")
    options = (
        "--data-dir",
        str(data),
        "--api-key",
        KEY,
        "--max-body-bytes",
        str(MAX_BODY_BYTES),
        "--complete-json-within-max-tokens",
    )
    with serving(*options, model=str(model), key=KEY) as running:
        yield running


@pytest.fixture
def temporary_folder(tmp_path, monkeypatch):
    """A folder for temporary files that nobody else uses."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
