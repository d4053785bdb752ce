"""PeerWatch: finds late or dead ranks if ranks share nothing but a store of torch.distributed."""

from __future__ import annotations

import atexit
import threading
import time
from typing import TYPE_CHECKING

from quire.base.logging import get_logger

if TYPE_CHECKING:
    from torch.distributed import Store

logger = get_logger(__name__)

_CLOSE_S = 2.0
_TICK_S = 0.25
_ANSWER_S = 0.7
_LONGEST_S = 2.0
_FAILURE_KEY = "quire/failure"


class PeerWatch:
    """Publishes this rank's progress in the store, and answers when another rank asks who is alive.

    A thread posts the number of collectives that this rank has begun after each change, at most four times a second.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._num_begun = 0
        self._has_answered = False
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-peer-watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def begin(self) -> None:
        """Record that this rank begins a collective, in which all ranks participate."""
        self._num_begun += 1

    def close(self) -> None:
        """Stop the thread, which may not be within a call to the store when the interpreter ends: the process would abort."""
        atexit.unregister(self.close)
        self._is_closed.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        posted = 0
        while not self._is_closed.wait(_TICK_S):
            try:
                if posted != self._num_begun:
                    posted = self._num_begun
                    self._store.set(f"quire/begun/{self._rank}", str(posted))
                if not self._has_answered and self._store.check([_FAILURE_KEY]):
                    self._answer()
            except RuntimeError as error:  # the store is gone with the rank that hosts it; operations will say so
                logger.debug("rank %d cannot reach the store: %s", self._rank, error)
                return

    def _answer(self) -> None:
        self._has_answered = True
        self._store.set(f"quire/alive/{self._rank}", "1")

    def late_ranks(self) -> list[int]:
        """Return the ranks that have posted fewer begun collectives than this one."""
        late: list[int] = []
        for other in range(self._size):
            key = f"quire/begun/{other}"
            begun = int(self._store.get(key)) if self._store.check([key]) else 0
            if other != self._rank and begun < self._num_begun:
                late.append(other)
        return late

    def gone_ranks(self) -> list[int]:
        """Ask all ranks whether they are alive; return those that do not answer within 0.7 s, or 2 s if there are several.

        The store is on rank 0: if it cannot be reached, rank 0 is the dead one.
        """
        try:
            self._store.set(_FAILURE_KEY, str(self._rank))
            self._answer()
            began_s = time.monotonic()
            missing = [other for other in range(self._size) if other != self._rank]
            while missing and time.monotonic() - began_s < (_ANSWER_S if len(missing) == 1 else _LONGEST_S):
                missing = [other for other in missing if not self._store.check([f"quire/alive/{other}"])]
                time.sleep(0.02)
        except RuntimeError:
            return [0]
        return missing
