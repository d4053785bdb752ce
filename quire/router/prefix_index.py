"""PrefixIndex: which chunks of prompts a backend was sent, so which prefixes its cache is likely to hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """The chunks of one backend; the least recently used are forgotten, as the backend forgets its blocks.

    It is approximate: the router does not see what the backend evicts. max_chunks: at most what the backend can hold.
    """

    def __init__(self, max_chunks: int) -> None:
        self.max_chunks = max_chunks
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def num_known(self, keys: Sequence[int]) -> int:
        """Return how many chunks from the first on were sent."""
        num_known = 0
        for key in keys:
            if key not in self._keys:
                break
            num_known += 1
        return num_known

    def add(self, keys: Sequence[int]) -> None:
        """Note that a prompt was sent. The last chunks count as the oldest: engines evict the ends of prefixes first."""
        known = self._keys
        for key in reversed(keys):
            known[key] = None
            known.move_to_end(key)
        self._shrink()

    def limit(self, max_chunks: int) -> None:
        """Set how many chunks are kept."""
        self.max_chunks = max(max_chunks, 1)
        self._shrink()

    def clear(self) -> None:
        """Forget everything: the backend has started again."""
        self._keys.clear()

    def _shrink(self) -> None:
        while len(self._keys) > self.max_chunks:
            self._keys.popitem(last=False)
