"""StepPacer: lets a thread work next to the steps, at most so many bytes in each."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCH_S = 0.0005
"""Seconds after which a thread that works next to the steps gives up the interpreter, in place of 0.005."""

_IDLE_S = 0.02
"""After so long without a step the thread goes on as if there had been one."""


class StepPacer:
    """The thread that runs steps calls begin_step and end_step; one other thread calls take before each piece of its work.

    bytes_per_step  which the other thread may read and write in each step; a larger piece counts for the next steps, too
    idle_s          seconds without a step after which it may do as much again
    """

    def __init__(self, bytes_per_step: int, idle_s: float | None = _IDLE_S) -> None:
        self.bytes_per_step = bytes_per_step
        self.num_bytes = 0
        self._idle_s = idle_s
        self._left, self._is_in_step = bytes_per_step, False
        self._changed = threading.Condition()

    def begin_step(self) -> None:
        """Allow as many bytes as one step does; what earlier steps left is lost."""
        with self._changed:
            self._is_in_step = True
            self._refill()
            self._changed.notify_all()

    def end_step(self) -> None:
        """Say that no step runs now."""
        with self._changed:
            self._is_in_step = False

    def take(self, num_bytes: int) -> None:
        """Return when a piece of that size may be done."""
        with self._changed:
            while self._left < min(num_bytes, self.bytes_per_step):
                if not self._changed.wait(self._idle_s) and not self._is_in_step:
                    self._refill()
            self._left -= num_bytes
            self.num_bytes += num_bytes

    def _refill(self) -> None:
        self._left = min(self.bytes_per_step, self._left + self.bytes_per_step)


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Let other threads have the interpreter soon when they want it, within the block. One thread at a time."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(min(usual, _SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
