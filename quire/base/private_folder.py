"""private_folder: a temporary folder of one process; what killed processes have left is removed by the next one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from quire.base.logging import get_logger

logger = get_logger(__name__)

_LOCK = "lock"


class PrivateFolder:
    """A new folder with mode 0700 below the folder for temporary files, which `close` or the end of `with` removes.

    Its process holds a lock on a file in it. The kernel releases the lock when the process ends, however it ends, so a folder
    with a free lock belongs to nobody: the constructor removes those of the same prefix and user.
    """

    def __init__(self, prefix: str) -> None:
        """prefix: of the folder's name, such as "quire-fleet-"."""
        _remove_left(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        # The file gets its name after it is locked, so that nobody finds it unlocked.
        unnamed = self.path / f"{_LOCK}.new"
        self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove the folder. Does nothing the second time."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _remove_left(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # it is being made, or being removed
            continue
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                logger.info("removed %s of a process that was killed", folder)
        finally:
            os.close(lock)
