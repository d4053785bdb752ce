"""MappedFiles: says before tensors of a checkpoint are read that their file is still as long as it was when it was opened."""

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
    """The files of a checkpoint that tensors are views of. Whoever reads a mapped file past its end is ended by the system.

    A descriptor of each file is kept until this is gone, so that a file put in its place does not matter.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._spans: list[tuple[int, _File]] = []

    def add(self, path: Path, num_bytes: int, tensors: Iterable[Tensor]) -> None:
        """Note that a file of this size is mapped, and tensors that lie in it; those that torch allocated do not.

        Raises ModelFormatError where it has become shorter already, or cannot be opened.
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
        # All lie in one mapping, so nothing else lies between them.
        start = min(storage.data_ptr() for storage in storages)
        index = bisect_right(self._starts, start)
        self._starts.insert(index, start)
        self._spans.insert(index, (max(storage.data_ptr() + storage.nbytes() for storage in storages), file))

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Raise ModelFormatError where the file of one of the tensors has become shorter; call it just before they are read."""
        for tensor in tensors:
            address = tensor.data_ptr()
            index = bisect_right(self._starts, address) - 1
            if index >= 0 and address < self._spans[index][0]:
                self._spans[index][1].check()
