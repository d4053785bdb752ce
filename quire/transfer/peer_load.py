"""PeerLoad: what a decode engine knows of one prefill engine: how fast it is, how much waits there, which prefixes it has.

All work is measured in pages that the prefill engine has to compute.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

CACHED_PAGE_WORK = 0.1
"""What a wanted page costs that the prefill engine has cached: it is copied, not computed."""
MAX_KNOWN_PAGES = 1 << 16
"""Keys that are remembered for each prefill engine; the oldest are forgotten first."""
_LEARNING_RATE = 0.2


@dataclass(eq=False, slots=True)
class PeerLoad:
    """The load of one prefill engine, as seen from here. The caller locks.

    s_per_page      seconds for each page of work, of waiting prompts and of a new one; None: nothing was measured yet
    num_transfers   that ended with pages since the start
    """

    s_per_page: float | None = None
    num_transfers: int = 0
    _own: dict[object, tuple[float, int]] = field(default_factory=dict[object, tuple[float, int]])  # work, wanted pages
    _num_others: float = 0.0
    _reported_s: float = float("-inf")
    _known: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])

    def work(self, keys: Sequence[int], first_page: int) -> float:
        """Return the work of a transfer: `keys` are those of its whole prompt, of which the pages from first_page on are
        wanted."""
        num_cached = next((index for index, key in enumerate(keys) if key not in self._known), len(keys))
        return len(keys) - num_cached + CACHED_PAGE_WORK * max(0, num_cached - first_page)

    def waiting(self, now: float, default_s_per_page: float | None) -> float:
        """Return the work that is there before a new transfer: own transfers, and those of other decode engines by the last
        report, less what was done since."""
        num_others = self._num_others
        s_per_page = self.s_per_page or default_s_per_page
        if num_others and s_per_page:
            num_others = max(0.0, num_others - (now - self._reported_s) / s_per_page)
        return sum(work for work, _ in self._own.values()) + num_others

    def begin(self, transfer: object, work: float, num_pages: int) -> None:
        """Note that a transfer of num_pages is asked for."""
        self._own[transfer] = work, num_pages

    def advance(self, transfer: object, num_pages_left: int) -> None:
        """Note how many pages of a transfer have still to come."""
        work, num_pages = self._own[transfer]
        self._own[transfer] = work * num_pages_left / num_pages, num_pages_left

    def report(self, num_waiting_pages: int, now: float) -> None:
        """Take in what the prefill engine says: pages that it has still to compute, own ones included."""
        self._num_others = max(0.0, float(num_waiting_pages - sum(num_pages for _, num_pages in self._own.values())))
        self._reported_s = now

    def end(self, transfer: object) -> None:
        """Note that a transfer is over."""
        self._own.pop(transfer, None)

    def learn(self, work_and_waiting: float, duration_s: float) -> None:
        """Take in how long a transfer took with the work that was before it and its own."""
        sample = duration_s / max(work_and_waiting, CACHED_PAGE_WORK)
        self.s_per_page = sample if self.s_per_page is None else self.s_per_page + _LEARNING_RATE * (sample - self.s_per_page)
        self.num_transfers += 1

    def scale(self, factor: float) -> None:
        """Change the expected time by a factor: it was late, or is to be tried again."""
        if self.s_per_page is not None:
            self.s_per_page *= factor

    def remember(self, keys: Sequence[int]) -> None:
        """Note that it has computed the pages of a prompt, so its prefix cache is likely to hold them."""
        for key in keys:
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > MAX_KNOWN_PAGES:
            self._known.popitem(last=False)

    def forget(self) -> None:
        """Forget the prefixes and the report: the prefill engine ended, or was started again."""
        self._known.clear()
        self._num_others, self._reported_s = 0.0, float("-inf")
