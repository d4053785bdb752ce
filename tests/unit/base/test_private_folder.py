"""Private folders: their mode, their end, and what a killed process leaves."""

import stat
import subprocess
import sys
from pathlib import Path

from quire.base.private_folder import PrivateFolder

MAKE = """import sys
from quire.base.private_folder import PrivateFolder
folder = PrivateFolder("quire-t-")
print(folder.path, flush=True)
sys.stdin.read()"""


def test_folder_of_a_killed_process_is_removed_and_that_of_a_running_one_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    processes = [
        subprocess.Popen([sys.executable, "-c", MAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        left, kept = (Path(one.stdout.readline().strip()) for one in processes)
        assert stat.S_IMODE(kept.stat().st_mode) == 0o700
        (left / "keys.json").write_text("secret")
        (tmp_path / "quire-t-without-lock").mkdir()
        (tmp_path / "quire-t-link").symlink_to(kept)
        processes[0].kill()
        processes[0].wait()
        with PrivateFolder("quire-t-") as own:
            names = {own.path.name, kept.name, "quire-t-without-lock", "quire-t-link"}
            assert {one.name for one in tmp_path.iterdir()} == names
            assert (kept / "lock").exists()
        assert not own.path.exists()
    finally:
        for one in processes:
            one.kill()
            one.communicate()
