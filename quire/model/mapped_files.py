"""MappedFiles: checks, before tensors of a checkpoint are read, that their file has not become shorter."""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from quire.base.errors import ModelFormatError


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    descriptor: int
    num_bytes: int

    def check(self) -> None:
        found = os.fstat(self.descriptor).st_size
        if found < self.num_bytes:
            raise ModelFormatError(
                f"{self.path} was changed while it was read: it had {self.num_bytes} bytes and has {found}; load it again"
            )


class MappedFiles:
    """The mapped files of a checkpoint's tensors. Reading a mapped file past its end kills the process (SIGBUS).

    A descriptor of each file is kept open, so that replacing the file has no effect.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._spans: list[tuple[int, _File]] = []

    def add(self, path: Path, num_bytes: int, tensors: Iterable[Tensor]) -> None:
        """Register a mapped file of this size and its tensors (tensors that torch allocated are not in it).

        Raises ModelFormatError if the file has already become shorter, or cannot be opened.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise ModelFormatError(f"{path} cannot be read: {error}") from error
        weakref.finalize(self, os.close, descriptor)
        file = _File(path, descriptor, num_bytes)
        file.check()
        storages = [storage for storage in (tensor.untyped_storage() for tensor in tensors) if not storage.resizable()]
        if not storages:
            return
        # All tensors are in one mapping, so no other memory is between them.
        start = min(storage.data_ptr() for storage in storages)
        index = bisect_right(self._starts, start)
        self._starts.insert(index, start)
        self._spans.insert(index, (max(storage.data_ptr() + storage.nbytes() for storage in storages), file))

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Raise ModelFormatError if the file of one of the tensors has become shorter. Call just before they are read."""
        for tensor in tensors:
            address = tensor.data_ptr()
            index = bisect_right(self._starts, address) - 1
            if index >= 0 and address < self._spans[index][0]:
                self._spans[index][1].check()
