"""How OpenMP's threads wait for each other, which has to be settled before torch is loaded."""

from __future__ import annotations

import os
import sys

_SPINS = "5000"


def prefer_short_spins() -> None:
    """Let the threads of a parallel region spin only shortly at its end, unless the environment says how they are to wait.

    By default they spin for long. Where another process uses the same cores, each of the many short regions of a small
    model then lasts until the scheduler takes the core from a thread that only spins: 10 times slower was seen. A few
    thousand spins outlast a region on an idle machine. No effect once torch is loaded.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
