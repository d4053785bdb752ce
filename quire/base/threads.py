"""Limits for the number of threads, and OpenMP's waiting policy, which must be set before torch is loaded."""

from __future__ import annotations

import os
import sys

from quire.base.errors import ConfigError

_SPINS = "5000"


def prefer_short_spins() -> None:
    """Make OpenMP threads spin only shortly at the end of a parallel region, unless the environment sets a policy.

    By default they spin for long. If another process uses the same cores, each of the many short regions of a small model
    then lasts until the scheduler preempts a thread that only spins: up to 10 times slower was measured. A few thousand
    spins are longer than a region on an idle machine. No effect after torch is loaded.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def num_usable_cores() -> int:
    """Return the number of cores that this process may use, which a container or pinning may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_num_threads(name: str, value: int | None) -> None:
    """Raise ConfigError for more threads than cores: they would only wait for each other. None: torch's default."""
    num_cores = num_usable_cores()
    if value is not None and not 1 <= value <= num_cores:
        raise ConfigError(f"{name} must be from 1 to {num_cores}, the cores that this process may use, got {value}")
