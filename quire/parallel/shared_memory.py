"""SharedMemoryFile: named areas of memory that ranks of one host share. The file is anonymous and freed automatically."""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import tempfile
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import ConfigError, InvariantError

ALIGNMENT = 128
"""Alignment of areas: a multiple of a cache line, and of the pair that processors fetch at once."""

_DIRECTORY_BYTES = 4096
_MAGIC = b"quire shared memory 1\n"


class SharedMemoryFile:
    """Areas by name, at the same offsets in every process that maps the file.

    The file is anonymous (memfd): a child inherits its descriptor, nothing is created in /dev/shm or a folder, and the system
    frees it when the last process that maps it ends, however it ends. All areas are initially zero.
    """

    def __init__(self, descriptor: int) -> None:
        """Map the file of a descriptor and take ownership of the descriptor. Raises ConfigError for any other file."""
        self._descriptor = descriptor
        size = os.fstat(descriptor).st_size
        if size < _DIRECTORY_BYTES:
            raise ConfigError(f"descriptor {descriptor} is not a shared memory file of quire: it has {size} bytes")
        self._map = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        text, _, _ = bytes(self._bytes[:_DIRECTORY_BYTES]).partition(b"\0")
        if not text.startswith(_MAGIC):
            raise ConfigError(f"descriptor {descriptor} is not a shared memory file of quire")
        self._areas: dict[str, tuple[int, int]] = {
            name: (offset, num_bytes) for name, offset, num_bytes in json.loads(text[len(_MAGIC) :])
        }

    @classmethod
    def create(cls, areas: Mapping[str, int]) -> SharedMemoryFile:
        """Create a file with areas of these sizes in bytes, in this order."""
        directory: list[tuple[str, int, int]] = []
        end = _DIRECTORY_BYTES
        for name, num_bytes in areas.items():
            if num_bytes < 0:
                raise ConfigError(f"area {name!r} of shared memory must have a size >= 0, got {num_bytes}")
            directory.append((name, end, num_bytes))
            end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        text = _MAGIC + json.dumps(directory).encode()
        if len(text) >= _DIRECTORY_BYTES:
            raise ConfigError(f"the names of {len(areas)} areas of shared memory take {len(text)} bytes: too many")
        descriptor = _create_anonymous_file()
        try:
            os.ftruncate(descriptor, end)
            os.pwrite(descriptor, text, 0)
            _forbid_resizing(descriptor)
            return cls(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def descriptor(self) -> int:
        """The descriptor that a child has to inherit (`pass_fds`). Raises InvariantError after close."""
        if self._descriptor < 0:
            raise InvariantError("the shared memory file has been closed")
        return self._descriptor

    @property
    def area_names(self) -> tuple[str, ...]:
        """The names of all areas, in order."""
        return tuple(self._areas)

    def area(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of an area, a view that keeps the memory mapped."""
        offset, num_bytes = self._find(name)
        return self._bytes[offset : offset + num_bytes]

    def address(self, name: str) -> int:
        """Return the address of an area in this process, for native code; valid as long as this object or a view lives."""
        return self._address + self._find(name)[0]

    def _find(self, name: str) -> tuple[int, int]:
        if name not in self._areas:
            raise InvariantError(f"no area {name!r} in shared memory; there are {', '.join(self._areas)}")
        return self._areas[name]

    def close(self) -> None:
        """Close the descriptor. The memory stays mapped until the last view of it is gone. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _create_anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("quire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:  # other systems than Linux: it has no name either
        return os.dup(file.fileno())


def _forbid_resizing(descriptor: int) -> None:
    """Prevent shrinking the file, which would kill the processes that map it."""
    if hasattr(os, "memfd_create"):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
