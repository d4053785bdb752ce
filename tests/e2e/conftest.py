import pytest

from tests.e2e.server_process import serving


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """One server that tests share; a test that harms it must make its own."""
    with serving("--data-dir", str(tmp_path_factory.mktemp("data"))) as running:
        yield running
