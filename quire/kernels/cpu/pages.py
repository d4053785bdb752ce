"""Which tensors lie in a mapped file, giving their pages back once they are read, and taking pages before they are written."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

_MAPS = Path("/proc/self/maps")
_MIN_BYTES = 1 << 16
"""Smaller tensors are not worth the question."""
_WAITING_BYTES = 16 << 20
"""What SpentPages lets stay in memory before it asks where it lies, which takes about half a millisecond."""

_MADV_POPULATE_WRITE = 23
"""Of Linux 5.14; Python 3.11 has no name for it."""

_Range = tuple[int, int]


def is_file_view(tensor: Tensor) -> bool:
    """Return whether all of a tensor's storage lies in mapped files, as the system sees it.

    Pages given back there come again from the file, as long as nobody wrote to them, which loading never does; other
    memory would turn to zeros, so nothing less than the system's own list of mappings is asked.
    """
    span = _storage_span(tensor)
    return span is not None and _covers(_file_mappings(), span)


class SpentPages:
    """Gives back the pages of tensors that are read for the last time: those in mapped files, many at once."""

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._num_bytes = 0

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Give the pages back, now or with those of the next tensors. Only for what a loader mapped and nobody wrote to."""
        for tensor in tensors:
            if tensor.is_contiguous() and _storage_span(tensor) is not None:
                self._waiting.append(tensor)
                self._num_bytes += tensor.nbytes
        if self._num_bytes >= _WAITING_BYTES:
            self.give_back()

    def give_back(self) -> None:
        """Give back the pages of all tensors that were added."""
        waiting, self._waiting, self._num_bytes = self._waiting, [], 0
        mappings = _file_mappings() if waiting else []
        for tensor in waiting:
            span = _storage_span(tensor)
            if span is not None and _covers(mappings, span):
                _forget(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def take_pages(address: int, num_bytes: int) -> bool:
    """Take the pages of [address, address + num_bytes) from the system, as writing them would; what is in them stays.

    Returns False where the system cannot, or has no memory left. The interpreter goes on meanwhile.
    """
    if sys.platform != "linux":
        return False
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = address + num_bytes - first
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_POPULATE_WRITE) == 0


def _storage_span(tensor: Tensor) -> _Range | None:
    """Return the addresses of a tensor's storage, or None where it is too small or torch allocated it."""
    storage = tensor.untyped_storage()
    if storage.resizable() or storage.nbytes() < _MIN_BYTES:
        return None
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _file_mappings() -> list[_Range]:
    """Return the addresses at which files are mapped, ascending; none where the system does not say."""
    if not _MAPS.exists():
        return []
    found: list[_Range] = []
    for line in _MAPS.read_text().splitlines():
        addresses, _, _, _, inode = line.split(maxsplit=5)[:5]
        if inode != "0":
            first, last = addresses.split("-")
            found.append((int(first, 16), int(last, 16)))
    return found


def _covers(mappings: list[_Range], span: _Range) -> bool:
    begin, end = span
    for first, last in mappings:
        if first <= begin < last:
            begin = last
        if begin >= end:
            return True
    return False


def _forget(begin: int, end: int) -> None:
    """Give back the whole pages of [begin, end)."""
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        # Advice: where the system refuses it, the pages stay until the file is closed.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
