"""How many threads there may be, and how OpenMP's wait for each other, which has to be settled before torch is loaded."""

from __future__ import annotations

import os
import sys

from quire.base.errors import ConfigError

_SPINS = "5000"


def prefer_short_spins() -> None:
    """Let the threads of a parallel region spin only shortly at its end, unless the environment says how they are to wait.

    By default they spin for long. Where another process uses the same cores, each of the many short regions of a small
    model then lasts until the scheduler takes the core from a thread that only spins: 10 times slower was seen. A few
    thousand spins outlast a region on an idle machine. No effect once torch is loaded.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def num_usable_cores() -> int:
    """Return the cores that this process may run on: of a container or a pinned process those that it was given."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_num_threads(name: str, value: int | None) -> None:
    """Raise ConfigError for more threads than there are cores: they would only wait for each other. None: left to torch."""
    num_cores = num_usable_cores()
    if value is not None and not 1 <= value <= num_cores:
        raise ConfigError(f"{name} must be from 1 to {num_cores}, the cores that this process may use, got {value}")
