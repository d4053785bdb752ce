"""Garbage collection thresholds for processes that create and drop thousands of objects in every step."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

# Number of new objects, and factors for the older generations: the objects of one step with hundreds of sequences do not
# trigger a collection. Full collections are as frequent as by default, so that garbage of refused requests does not accumulate.
_THRESHOLDS = (10_000, 3, 2)


def collect_seldom() -> None:
    """Let the collector run after many more new objects than by default."""
    gc.set_threshold(*_THRESHOLDS)


@contextmanager
def paused_collector() -> Generator[None]:
    """Disable the collector within the context."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
