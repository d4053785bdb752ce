"""HostSlab: the memory of the host tier in one process, and the copies between it and the blocks of a KV pool."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from quire.contracts.shared_slots import SharedSlots
from quire.kv.pool import KvPool

_ALIGNMENT = 64


class HostSlab:
    """Slots of one page each. A page holds one block: of each array of the pool the block's bytes, one after the other.

    The memory is taken from the system only as slots are first written. Ranks of one model have a slab each, with the same
    slots, for their parts of the blocks.

    page_bytes      of one block
    stride          bytes from slot to slot
    shared          the slots for other processes; None: they are not shared
    save_s, load_s  seconds of `move` so far
    """

    def __init__(self, pool: KvPool, num_slots: int, is_shared: bool = False) -> None:
        """Make the slots. is_shared: other processes are to read them, see `shared`."""
        self._blocks = [_bytes_of(array, pool.num_blocks) for array in pool.arrays()]
        self.page_bytes = sum(blocks.shape[1] for blocks in self._blocks)
        self.num_slots = num_slots
        self.save_s = self.load_s = 0.0
        self.stride = stride = -(-self.page_bytes // _ALIGNMENT) * _ALIGNMENT
        self.shared: SharedSlots | None = None
        if is_shared:
            memory, fd = _shared_memory(num_slots * stride)
            self.shared = SharedSlots(fd, num_slots, stride)
            weakref.finalize(self, os.close, fd)
        else:
            memory = mmap.mmap(-1, num_slots * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._slots: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8).reshape(num_slots, stride)
        self._parts: list[NDArray[np.uint8]] = []
        first = 0
        for blocks in self._blocks:
            last = first + blocks.shape[1]
            self._parts.append(self._slots[:, first:last])
            first = last

    @property
    def address(self) -> int:
        """Where slot 0 is in the memory of this process."""
        return int(self._slots.ctypes.data)

    def attach(self, pool: KvPool | None) -> None:
        """Copy from and to another pool of the same shape from now on; None: to none, so that the pool can be freed."""
        self._blocks = [] if pool is None else [_bytes_of(array, pool.num_blocks) for array in pool.arrays()]

    def page(self, slot: int) -> NDArray[np.uint8]:
        """Return the bytes of the page in a slot [page_bytes], to be read or written."""
        return self._slots[slot, : self.page_bytes]

    def move(self, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to slots, (block, slot), and then slots to blocks, (slot, block)."""
        started_s = time.perf_counter()
        for blocks, part in zip(self._blocks, self._parts, strict=True):
            for block_id, slot in saves:
                part[slot] = blocks[block_id]
        saved_s = time.perf_counter()
        for blocks, part in zip(self._blocks, self._parts, strict=True):
            for slot, block_id in loads:
                blocks[block_id] = part[slot]
        self.save_s += saved_s - started_s
        self.load_s += time.perf_counter() - saved_s


def _shared_memory(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Return memory of a fixed size, which can be mapped safely, and a file descriptor by which others may only read it."""
    fd = os.memfd_create("quire-kv-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
        return memory, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)


def _bytes_of(array: torch.Tensor, num_blocks: int) -> NDArray[np.uint8]:
    """Return a view [num_blocks, bytes] of an array that has its blocks one after the other."""
    return array.view(num_blocks, -1).view(torch.uint8).numpy()
