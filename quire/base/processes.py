"""What processes that quire starts have in common."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> bool:
    """Let the kernel kill this process when the thread that started it ends; return whether the parent is still there.

    Elsewhere than on Linux nothing is set, and the caller has to notice by other means, such as the end of standard input.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent_pid
