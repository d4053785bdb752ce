"""Sleep levels and modes: how much of its memory an engine releases, and what becomes of its requests."""

from __future__ import annotations

from typing import Literal

from quire.base.errors import RequestError

SleepLevel = Literal[1, 2]
"""1: the KV cache is freed, and weights on a GPU are moved to host memory. 2: the weights are dropped, too."""

SleepMode = Literal["abort", "wait"]
"""abort: unfinished requests end at once. wait: they are finished first."""

SLEEP_LEVELS: tuple[SleepLevel, ...] = (1, 2)
SLEEP_MODES: tuple[SleepMode, ...] = ("abort", "wait")


def check_sleep_arguments(level: object, mode: object) -> tuple[SleepLevel, SleepMode]:
    """Return a level and a mode. Raises RequestError for others."""
    found: SleepLevel | None = next((known for known in SLEEP_LEVELS if known == level and not isinstance(level, bool)), None)
    if found is None:
        raise RequestError(f"level must be 1 or 2, got {level!r}", "level")
    known_mode: SleepMode | None = next((known for known in SLEEP_MODES if known == mode), None)
    if known_mode is None:
        raise RequestError(f"mode must be 'abort' or 'wait', got {str(mode)[:50]!r}", "mode")
    return found, known_mode
