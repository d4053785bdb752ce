"""Interrupts: delay Ctrl-C while the engine changes its state, so that an interrupt never leaves the state inconsistent."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """The handling of Ctrl-C for one engine.

    Does nothing outside the main thread, or if the program has its own handler of SIGINT.
    """

    def __init__(self) -> None:
        self._is_watching = False
        self._is_deferring = False
        self._is_noted = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Keep the handler installed, so that `deferred` does not have to install it, which takes a tenth of a small step.

        Outside of `deferred` Ctrl-C is raised at once, as usual.
        """
        is_ours = threading.current_thread() is threading.main_thread()
        if self._is_watching or not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._note)
        self._is_watching = True
        try:
            yield
        finally:
            self._is_watching = False
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Delay a KeyboardInterrupt to the end of the block; a second one is raised at once."""
        if not self._is_watching:
            with self.watched():
                if not self._is_watching:
                    yield
                    return
                with self.deferred():
                    yield
            return
        self._is_noted, self._is_deferring = False, True
        try:
            yield
        finally:
            self._is_deferring = False
            if self._is_noted:
                raise KeyboardInterrupt

    def _note(self, _signal: int, _frame: FrameType | None) -> None:
        if self._is_noted or not self._is_deferring:
            raise KeyboardInterrupt
        self._is_noted = True
