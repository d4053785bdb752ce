"""LinePlaces: bounds the number of batch lines that run at once, fairly between owners."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from quire.serving.admission.shares import most_beside


class LinePlaces:
    """Gives places to owners in turn, and to the lines of one owner in order of arrival.
    Owners that have places leave some free, so an owner without any gets one at once, however long the lines of the others
    take. The fair queue before the engine does the rest.
    max_running  returns the number of places; called for each line
    """

    def __init__(self, max_running: Callable[[], int]) -> None:
        self._max_running = max_running
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in round-robin order

    @asynccontextmanager
    async def place(self, owner: str) -> AsyncGenerator[None]:
        """Wait for a place for an owner, and hold it within `async with`."""
        given = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(given)
        self._give()
        try:
            await given
            yield
        finally:
            if given.done() and not given.cancelled():
                self._taken[owner] -= 1
                if not self._taken[owner]:
                    del self._taken[owner]
            else:
                self._forget(owner, given)
            self._give()

    def _give(self) -> None:
        while self._waiting:
            owner = min(self._waiting, key=lambda name: self._taken[name])  # ties: least recently served
            if not self._has_place_for(owner):
                return
            waiting = self._waiting.pop(owner)
            given = waiting.popleft()
            if waiting:
                self._waiting[owner] = waiting  # now last in order
            if not given.cancelled():
                self._taken[owner] += 1
                given.set_result(None)

    def _has_place_for(self, owner: str) -> bool:
        own, num_free = self._taken[owner], self._max_running() - self._taken.total()
        if not own:
            return num_free > 0 or not self._taken.total()
        return own + 1 <= most_beside(num_free - 1)

    def _forget(self, owner: str, given: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(owner)
        if waiting is not None and given in waiting:
            waiting.remove(given)
            if not waiting:
                del self._waiting[owner]
