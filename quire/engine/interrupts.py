"""Hold Ctrl-C back while the engine changes its books, so that an interrupt never leaves them half changed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Raise a KeyboardInterrupt that comes inside only at the end; a second one is raised at once.

    Does nothing outside the main thread, or where SIGINT has a handler of the program's own.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    is_interrupted = False

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal is_interrupted
        if is_interrupted:
            raise KeyboardInterrupt
        is_interrupted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_interrupted:
            raise KeyboardInterrupt
