"""PageMoveCounters: how many of the page moves of a model that several GPUs share each rank has ended."""

from __future__ import annotations

from quire.parallel.barrier import native_extension
from quire.parallel.shared_memory import SharedMemoryFile

_AREA = "page_moves"
_LINE = 64


class PageMoveCounters:
    """A counter for each rank, in the memory of the group. All ranks make the same moves in the same order, which are done when
    they are on all ranks."""

    def __init__(self, memory: SharedMemoryFile, size: int) -> None:
        self._native, self._size = native_extension(), size
        self._first = memory.address(_AREA)

    @staticmethod
    def areas(size: int) -> dict[str, int]:
        """Return the area that it needs of the memory of a group."""
        return {_AREA: size * _LINE}

    def set(self, rank: int, count: int) -> None:
        """Say how many moves a rank has ended; by that rank only."""
        self._native.advance_counter(self._first + rank * _LINE, count)

    def least(self) -> int:
        """Return how many moves all ranks have ended."""
        return min(self._native.read_counter(self._first + rank * _LINE) for rank in range(self._size))
