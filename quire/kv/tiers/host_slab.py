"""HostSlab: the memory of the host tier in one process, and the copies between it and the blocks of a KV pool."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from quire.kv.pool import KvPool

_ALIGNMENT = 64


class HostSlab:
    """Slots of one page each. A page holds one block: of each array of the pool the block's bytes, one after the other.

    The memory is taken from the system only as slots are first written. Ranks of one model have a slab each, with the same
    slots, for their parts of the blocks.

    page_bytes      of one block
    save_s, load_s  seconds of `move` so far
    """

    def __init__(self, pool: KvPool, num_slots: int) -> None:
        self._blocks = [_bytes_of(array, pool.num_blocks) for array in pool.arrays()]
        self.page_bytes = sum(blocks.shape[1] for blocks in self._blocks)
        self.num_slots = num_slots
        self.save_s = self.load_s = 0.0
        stride = -(-self.page_bytes // _ALIGNMENT) * _ALIGNMENT
        memory = mmap.mmap(-1, num_slots * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._slots: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8).reshape(num_slots, stride)
        self._parts: list[NDArray[np.uint8]] = []
        first = 0
        for blocks in self._blocks:
            last = first + blocks.shape[1]
            self._parts.append(self._slots[:, first:last])
            first = last

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


def _bytes_of(array: torch.Tensor, num_blocks: int) -> NDArray[np.uint8]:
    """Return a view [num_blocks, bytes] of an array that has its blocks one after the other."""
    return array.view(num_blocks, -1).view(torch.uint8).numpy()
