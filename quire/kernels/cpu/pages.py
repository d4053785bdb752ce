"""Memory pages: find tensors in mapped files, release their pages after the last read, and populate pages before writing."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from torch import Tensor

_MAPS = Path("/proc/self/maps")
_MIN_BYTES = 1 << 16
"""Smaller tensors are not looked up."""
_WAITING_BYTES = 16 << 20
"""Size of tensors that SpentPages collects before it reads the list of mappings, which takes about half a millisecond."""

_MADV_POPULATE_WRITE = 23
"""Since Linux 5.14; Python 3.11 has no constant for it."""

_Range = tuple[int, int]


def is_file_view(tensor: Tensor) -> bool:
    """Return whether all of a tensor's storage lies in mapped files, according to the operating system.

    Released pages of a file are read from it again, as long as they were never written, and loading never writes them. Other
    memory would be replaced by zeros, so only the system's list of mappings is trusted.
    """
    span = _storage_span(tensor)
    return span is not None and _covers(_file_mappings(), span)


class SpentPages:
    """Releases the pages of tensors that have been read for the last time: those in mapped files, many at once."""

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._num_bytes = 0

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Release the pages, now or with those of later tensors. Only for tensors that a loader mapped and nobody wrote to."""
        for tensor in tensors:
            if tensor.is_contiguous() and _storage_span(tensor) is not None:
                self._waiting.append(tensor)
                self._num_bytes += tensor.nbytes
        if self._num_bytes >= _WAITING_BYTES:
            self.give_back()

    def give_back(self) -> None:
        """Release the pages of all tensors that were added."""
        waiting, self._waiting, self._num_bytes = self._waiting, [], 0
        mappings = _file_mappings() if waiting else []
        for tensor in waiting:
            span = _storage_span(tensor)
            if span is not None and _covers(mappings, span):
                _forget(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def take_pages(address: int, num_bytes: int) -> bool:
    """Populate the pages of [address, address + num_bytes), as writing would; their contents are kept.

    Return False if the system does not support it or has no memory left. The GIL is released meanwhile.
    """
    if sys.platform != "linux":
        return False
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = address + num_bytes - first
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_POPULATE_WRITE) == 0


def ask_for_huge_pages(memory: mmap.mmap) -> None:
    """Let memory have huge pages, if the system has them."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # kernels without them refuse the advice
            memory.madvise(mmap.MADV_HUGEPAGE)


def drop_pages(tensor: Tensor) -> None:
    """Give the memory of a contiguous tensor on the CPU back to the system; its values become zeros.

    The tensor keeps its address, and gets new pages as it is written. Only for memory that no file backs.
    """
    if tensor.nbytes < mmap.PAGESIZE or not _drop(tensor):
        tensor.zero_()


def _drop(tensor: Tensor) -> bool:
    """Drop the whole pages of a tensor, and set the rest to zero; return whether the system supports it."""
    if sys.platform != "linux":
        return False
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if last <= first:
        return False
    for start, stop in ((begin, first), (last, end)):
        ctypes.memset(start, 0, stop - start)
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED) == 0


def _storage_span(tensor: Tensor) -> _Range | None:
    """Return the address range of a tensor's storage, or None if it is small or torch allocated it."""
    storage = tensor.untyped_storage()
    if storage.resizable() or storage.nbytes() < _MIN_BYTES:
        return None
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _file_mappings() -> list[_Range]:
    """Return the address ranges at which files are mapped, ascending; empty if the system does not list them."""
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
    """Release the whole pages within [begin, end)."""
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        # Best effort: if the system refuses, the pages stay until the file is closed.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
