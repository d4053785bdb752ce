"""SequenceQueue: sequences in the order of the policy."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from quire.base.errors import InvariantError
from quire.engine.scheduling.sequence import OrderKey, Sequence


def _key(sequence: Sequence) -> OrderKey:
    return sequence.order_key


class SequenceQueue:
    """A list sorted by order_key. Adding and removing search by bisection, and then only move pointers."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sequences)

    @property
    def first(self) -> Sequence:
        """The sequence that comes before all others; the queue must not be empty."""
        return self._sequences[0]

    @property
    def last(self) -> Sequence:
        """The sequence that comes after all others; the queue must not be empty."""
        return self._sequences[-1]

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence in order."""
        insort(self._sequences, sequence, key=_key)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence. Raises InvariantError if it is not in the queue."""
        index = bisect_left(self._sequences, sequence.order_key, key=_key)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            raise InvariantError(f"sequence {sequence.sequence_id} is not in the queue it should be in")
        del self._sequences[index]
