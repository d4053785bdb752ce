"""Preparation: the threads in which prompts are rendered and tokenised, so that a long one holds up no tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from quire.serving.errors import overloaded

P = ParamSpec("P")
T = TypeVar("T")


class Preparation:
    """A few threads and a bounded queue before them. Used from the event loop.

    max_waiting  calls that may run or wait; one more is refused with 503
    """

    def __init__(self, num_threads: int = 2, max_waiting: int = 512) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="quire-prepare")
        self._max_waiting = max_waiting
        self._num_waiting = 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the function returns. Raises ApiError 503 when too many calls wait."""
        if self._num_waiting >= self._max_waiting:
            raise overloaded(f"{self._num_waiting} prompts are waiting to be tokenised", 1.0)
        self._num_waiting += 1
        future = self._pool.submit(function, *args, **kwargs)
        # Counted down when the thread is done with it, and not when the client has stopped waiting.
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: _call_soon(loop, self._end_one))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Refuse what comes, drop what waits; what runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _end_one(self) -> None:
        self._num_waiting -= 1


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
