"""Temporary folders of servers: gone with their process, however it ends, and never that of a living one."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from quire.serving.batch.scratch import PREFIX, ScratchFolder, remove_abandoned
from quire.serving.batch.store import BatchStore

HOLD = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from quire.serving.batch.scratch import ScratchFolder
folder = ScratchFolder()
(folder.path / "upload").write_bytes(b"x")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_folder_is_removed_when_its_process_was_killed_and_not_before(temporary):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(temporary)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        path = Path(process.stdout.readline().strip())
        try:
            remove_abandoned()
            assert (path / "upload").exists()
        finally:
            process.send_signal(signal.SIGKILL)
    assert (path / "upload").exists()
    store = BatchStore(None)  # as the next server does
    assert not path.exists()
    assert len(list(temporary.iterdir())) == 1
    store.close()
    assert list(temporary.iterdir()) == []


def test_folder_stays_while_this_process_has_it():
    folder = ScratchFolder()
    remove_abandoned()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.close()
    folder.close()
    assert not folder.path.exists()


def test_folder_that_no_server_has_locked_stays_and_so_does_what_a_link_names(temporary):
    mine, other = temporary / f"{PREFIX}being-made", temporary / "other"
    mine.mkdir()
    other.mkdir()
    (other / "lock").touch()
    (temporary / f"{PREFIX}link").symlink_to(other)
    (mine / "lock").symlink_to(other / "lock")
    remove_abandoned()
    assert {path.name for path in temporary.iterdir()} == {mine.name, "other", f"{PREFIX}link"}
