"""ScratchFolder: a temporary folder of one process, which the next process removes if this one was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from pathlib import Path

from quire.base.logging import get_logger

logger = get_logger(__name__)

PREFIX = "quire-files-"
_LOCK = "lock"


class ScratchFolder:
    """A folder of mode 0700 in the folder for temporary files. Raises OSError if it cannot be created.

    The process holds a lock on a file in it, which the system releases however the process ends; process ids would not do, as
    they are reused and differ between containers. The file gets its name after it is locked; a folder without it is left alone.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        coming = self.path / f"{_LOCK}.tmp"
        lock = os.open(coming, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        coming.rename(self.path / _LOCK)
        self._finalizer = weakref.finalize(self, _remove, self.path, lock)  # also called at exit

    def close(self) -> None:
        """Remove the folder and what is in it."""
        self._finalizer()


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def remove_abandoned() -> None:
    """Remove this user's folders whose processes ended without removing them. Failures are logged."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("%s is not removed: %s", path, error)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its process is alive
        else:
            logger.info("removing %s, whose server was killed", path)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
