"""Which tensors lie in a mapped file, so that their pages can be given back once they are packed."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

_MAPS = Path("/proc/self/maps")
_MIN_BYTES = 1 << 16
"""Smaller tensors are not worth the question."""


def is_file_view(tensor: Tensor) -> bool:
    """Return whether all of a tensor's storage lies in mapped files, as the system sees it.

    Pages given back there come again from the file, as long as nobody wrote to them, which loading never does; other
    memory would turn to zeros, so nothing less than the system's own list of mappings is asked.
    """
    storage = tensor.untyped_storage()
    if storage.resizable() or storage.nbytes() < _MIN_BYTES or not _MAPS.exists():
        return False
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    for line in _MAPS.read_text().splitlines():
        addresses, _, _, _, inode = line.split(maxsplit=5)[:5]
        first, last = (int(address, 16) for address in addresses.split("-"))
        if first <= begin < last and inode != "0":
            begin = last
        if begin >= end:
            return True
    return False
