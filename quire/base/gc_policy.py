"""How often the garbage collector looks, in processes that make and drop thousands of objects in every step."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

# Objects, and so many times as seldom for the older ones: what one step of hundreds of sequences brings is no reason to look.
# All are looked at as often as by default, so that what refused requests leave behind does not pile up.
_THRESHOLDS = (10_000, 3, 2)


def collect_seldom() -> None:
    """Let the collector look after many more new objects than by default."""
    gc.set_threshold(*_THRESHOLDS)


@contextmanager
def paused_collector() -> Generator[None]:
    """Collect nothing meanwhile."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
