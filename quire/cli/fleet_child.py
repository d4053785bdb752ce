"""The process of one model of a fleet: `quire serve` with a file of options, which ends with the process that started it."""

from __future__ import annotations

import os
import signal
import sys
import threading

from quire.base.processes import end_with_parent
from quire.cli.main import main

_READ_BYTES = 4096


def run(argv: list[str]) -> int:
    """Serve; argv: the id of the parent's process, and the file of the options."""
    parent_pid, path = argv
    if not end_with_parent(int(parent_pid)):
        return 1
    # Where the kernel does not end this process with its parent, the end of its standard input does.
    threading.Thread(target=_end_with_input, name="quire-parent-watch", daemon=True).start()
    return main(["serve", "--config", path])


def _end_with_input() -> None:
    while os.read(0, _READ_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
