"""The files of the server's stores, and who may read them."""

import os

import pytest

from quire.serving.batch.store import BatchStore
from quire.serving.responses.store import ResponseTable


@pytest.fixture
def open_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder):
    """Return the permissions of a folder and of all in it, by name."""
    found = (folder, *folder.iterdir())
    return {path.name: path.stat().st_mode & 0o777 for path in found}


def both(folder):
    return BatchStore(folder), ResponseTable(folder, None, lambda owner: 1 << 20)


@pytest.mark.usefixtures("open_umask")
def test_nobody_else_can_read_what_is_stored_when_the_folder_is_new(tmp_path):
    folder = tmp_path / "new" / "data"
    stores = both(folder)
    files = {f"{name}.sqlite{end}": 0o600 for name in ("batches", "responses") for end in ("", "-wal", "-shm")}
    assert modes(folder) == {"data": 0o700, "files": 0o700, **files}
    for store in stores:
        store.close()


@pytest.mark.usefixtures("open_umask")
def test_databases_are_closed_to_others_and_the_folder_stays_when_an_earlier_version_made_them(tmp_path):
    stores = both(tmp_path)
    for path in tmp_path.glob("*.sqlite*"):
        path.chmod(0o644)
    tmp_path.chmod(0o755)
    again = both(tmp_path)
    found = modes(tmp_path)
    assert found.pop(tmp_path.name) == 0o755
    assert {mode for name, mode in found.items() if "sqlite" in name} == {0o600}
    for store in (*stores, *again):
        store.close()
