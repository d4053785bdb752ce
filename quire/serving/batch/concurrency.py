"""LinePlaces: bounds the number of batch lines that run at once, fairly between owners."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from quire.serving.admission.fair_share import FairClock, Share, exceeds_share


@dataclass(slots=True)
class _Owner:
    """Whose lines wait, in the order in which they came, and how many hold a place. A place costs 1."""

    share: Share = field(default_factory=Share)
    num_taken: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque[asyncio.Future[None]])


class LinePlaces:
    """Gives places to owners in turn, and to the lines of one owner in order of arrival.
    Owners that have places leave some free, so an owner without any gets one at once, however long the lines of the others
    take. The fair queue before the engine does the rest.
    max_running  returns the number of places; called for each line
    """

    def __init__(self, max_running: Callable[[], int]) -> None:
        self._max_running = max_running
        self._clock = FairClock()
        self._owners: dict[str, _Owner] = {}

    @asynccontextmanager
    async def place(self, owner: str) -> AsyncGenerator[None]:
        """Wait for a place for an owner, and hold it within `async with`."""
        given = asyncio.get_running_loop().create_future()
        found = self._owners.get(owner)
        if found is None:
            found = self._owners[owner] = _Owner()
            self._clock.enter(found.share)
        found.waiting.append(given)
        self._give()
        try:
            await given
            yield
        finally:
            if given.done() and not given.cancelled():
                found.num_taken -= 1
            elif given in found.waiting:
                found.waiting.remove(given)
            if not found.num_taken and not found.waiting and self._owners.get(owner) is found:
                del self._owners[owner]
            self._give()

    def _give(self) -> None:
        while waiting := [owner for owner in self._owners.values() if owner.waiting]:
            owner = min(waiting, key=lambda one: (one.num_taken, one.share.received))
            if not self._has_place_for(owner):
                return
            given = owner.waiting.popleft()
            if not given.cancelled():
                self._clock.serve(owner.share)
                owner.share.charge(1)
                owner.num_taken += 1
                given.set_result(None)

    def _has_place_for(self, owner: _Owner) -> bool:
        num_taken = sum(one.num_taken for one in self._owners.values())
        num_free = self._max_running() - num_taken
        if not owner.num_taken:
            return num_free > 0 or not num_taken
        return not exceeds_share(owner.num_taken, 1, num_free - 1)
