"""HostSlab: the memory of the host tier in one process, and the copies between it and the blocks of a KV pool."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quire.contracts.kv_spec import KvSpec
from quire.contracts.shared_slots import SharedSlots
from quire.kernels.cpu.pages import ask_for_huge_pages
from quire.kv.pool import KvPool

_ALIGNMENT = 64
MAX_SAVED_BYTES_ON_GPU = 1 << 30
"""The most that one step of a GPU copies to the host tier, next to the steps: a buffer on the GPU has as much."""
_LOAD_STAGING_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class PagePart:
    """What a process holds of the pages of a model that is divided among processes of one host.

    The page of a block is that of the whole model on one process, so it does not depend on how the model is divided. A
    recurrent state has the parts of all tensor-parallel ranks, one after the other, each with all layers.

    file         descriptor of the memory of all slots, see `slots_file`
    whole        the KV cache of the whole model
    own          that of the process: of consecutive layers, with some of the key and value heads of each
    first_layer  of its layers, in the model
    first_heads  of each of its layers, the first key and value head, in the layer
    state_bytes  of a recurrent state over all ranks; 0: there is none
    first_state_byte  of the process's part of it
    """

    file: int
    whole: KvSpec
    own: KvSpec
    first_layer: int = 0
    first_heads: tuple[int, ...] = ()
    state_bytes: int = 0
    first_state_byte: int = 0

    def offsets(self) -> list[int]:
        """Return where in a page the bytes of each array of the process are, in the order of KvPool.arrays."""
        starts: dict[tuple[str, int], tuple[int, int]] = {}
        first = 0
        for name, layer, head_bytes in self.whole.block_arrays():
            starts[name, layer] = first, head_bytes
            first += head_bytes * self.whole.layer_shapes[layer][0]
        found: list[int] = []
        for name, layer, _ in self.own.block_arrays():
            start, head_bytes = starts[name, self.first_layer + layer]
            found.append(start + self.first_heads[layer] * head_bytes)
        return found


class HostSlab:
    """Slots of one page each. A page holds one block: of each array of the pool the block's bytes, one after the other.

    A recurrent state takes several pages, or a part of one. Its bytes are those of its tensors, one after the other, cut into
    pages. Page p of checkpoint c is named as block num_blocks + c * num_state_pages + p. Where blocks have no bytes, a page is
    a state.

    The memory is taken from the system only as slots are first written. Processes of one model on one host share the slots,
    and each copies its part of a page. Those on several hosts have a slab each, with the same slots, for their parts of the
    blocks.

    page_bytes      of one block
    stride          bytes from slot to slot
    shared          the slots for other engines; None: they are not shared
    file            descriptor of the memory, where it is that of `slots_file`; None: it is of this process alone
    save_s, load_s  seconds of `move` so far
    """

    def __init__(
        self,
        pool: KvPool | None,
        num_slots: int,
        is_shared: bool = False,
        part: PagePart | None = None,
        page_bytes: int | None = None,
        file: int | None = None,
        num_checkpoints: int = 0,
    ) -> None:
        """Make the slots, or map those of `part` or `file`.

        pool        None: this process has no blocks on the host, but reads and writes pages
        is_shared   other engines are to read them, see `shared`
        page_bytes  without a pool or part: of a page
        file        descriptor of the memory of all slots, see `slots_file`
        num_checkpoints  the last rows of the pool's recurrent states, which are saved and loaded
        """
        self.attach(pool)
        sizes = [blocks.shape[1] for blocks in self._blocks]
        own_bytes = sum(sizes) if page_bytes is None else page_bytes
        state_bytes = sum(states.shape[1] for states in self._states) if part is None else part.state_bytes
        self.page_bytes = (own_bytes if part is None else part.whole.bytes_per_block) or state_bytes
        self._num_blocks, self._num_checkpoints = 0 if pool is None else pool.num_blocks, num_checkpoints
        first_byte = 0 if part is None else part.first_state_byte
        self._state_pieces = state_pieces(
            [states.shape[1] for states in self._states], first_byte, state_bytes, self.page_bytes
        )
        self.num_slots = num_slots
        self.save_s = self.load_s = 0.0
        self.stride = stride = slot_stride(self.page_bytes)
        self.shared: SharedSlots | None = None
        file = file if part is None else part.file
        self.file: int | None = None
        if file is not None or is_shared:
            self.file = slots_file(num_slots, self.page_bytes) if file is None else os.dup(file)
            weakref.finalize(self, os.close, self.file)
        if self.file is None:
            memory = mmap.mmap(-1, num_slots * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            ask_for_huge_pages(memory)  # otherwise the first use of a slot takes longer than reading it from disk
        else:
            memory = mmap.mmap(self.file, num_slots * stride, flags=mmap.MAP_SHARED)
        if self.file is not None and is_shared:
            fd = os.open(f"/proc/self/fd/{self.file}", os.O_RDONLY | os.O_CLOEXEC)
            self.shared = SharedSlots(fd, num_slots, stride)
            weakref.finalize(self, os.close, fd)
        self._slots: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8).reshape(num_slots, stride)
        firsts = (np.cumsum(sizes) - sizes).tolist() if part is None else part.offsets()
        self._parts = [self._slots[:, first : first + size] for first, size in zip(firsts, sizes, strict=True)]

    @property
    def address(self) -> int:
        """Where slot 0 is in the memory of this process."""
        return int(self._slots.ctypes.data)

    def slots(self) -> NDArray[np.uint8]:
        """Return the bytes of the pages in all slots [num_slots, page_bytes], `stride` apart."""
        return self._slots[:, : self.page_bytes]

    def attach(self, pool: KvPool | None) -> None:
        """Copy from and to another pool of the same shape from now on; None: to none, so that the pool can be freed."""
        self._blocks = [] if pool is None else [_bytes_of(array, pool.num_blocks) for array in pool.arrays()]
        tensors = [] if pool is None else [tensor for layer in pool.states for tensor in layer if tensor.numel() > 0]
        self._states = [_bytes_of(tensor, len(tensor)) for tensor in tensors]

    def page(self, slot: int) -> NDArray[np.uint8]:
        """Return the bytes of the page in a slot [page_bytes], to be read or written."""
        return self._slots[slot, : self.page_bytes]

    def move(self, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to slots, (block, slot), and then slots to blocks, (slot, block)."""
        started_s = time.perf_counter()
        if self._state_pieces:
            saves = [pair for pair in saves if not self._copy_state(*pair, is_saved=True)]
        for blocks, part in zip(self._blocks, self._parts, strict=True):
            for block_id, slot in saves:
                part[slot] = blocks[block_id]
        saved_s = time.perf_counter()
        if self._state_pieces:
            loads = [pair for pair in loads if not self._copy_state(*pair[::-1], is_saved=False)]
        for blocks, part in zip(self._blocks, self._parts, strict=True):
            for slot, block_id in loads:
                blocks[block_id] = part[slot]
        self.save_s += saved_s - started_s
        self.load_s += time.perf_counter() - saved_s

    def _copy_state(self, block_id: int, slot: int, is_saved: bool) -> bool:
        """Copy the part of a page of a state that this process has; False: the page is that of a block."""
        if block_id < self._num_blocks:
            return False
        checkpoint, page = divmod(block_id - self._num_blocks, len(self._state_pieces))
        for tensor, first, place, size in self._state_pieces[page]:
            states = self._states[tensor]
            state = states[len(states) - self._num_checkpoints + checkpoint, first : first + size]
            saved = self._slots[slot, place : place + size]
            if is_saved:
                saved[:] = state
            else:
                state[:] = saved
        return True


def staged_pages(page_bytes: int, num_slots: int) -> tuple[int, int]:
    """Return how many pages the buffers on a GPU have that saves and loads of a slab pass through."""
    saved, loaded = (num_bytes // max(1, page_bytes) for num_bytes in (MAX_SAVED_BYTES_ON_GPU, _LOAD_STAGING_BYTES))
    return max(1, min(num_slots, saved)), max(1, min(num_slots, max(2, loaded)))


def slot_stride(page_bytes: int) -> int:
    """Return the bytes from slot to slot."""
    return -(-page_bytes // _ALIGNMENT) * _ALIGNMENT


def slots_file(num_slots: int, page_bytes: int) -> int:
    """Return a descriptor of memory for slots, of a fixed size, so that it can be mapped safely."""
    file = os.memfd_create("quire-kv-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, num_slots * slot_stride(page_bytes))
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(file)
        raise
    return file


def slots_of(slab: HostSlab | None, num_slots: int, page_bytes: int) -> int:
    """Return another descriptor of the memory of a slab that other processes have mapped, or else `slots_file`."""
    return slots_file(num_slots, page_bytes) if slab is None or slab.file is None else os.dup(slab.file)


def state_pieces(
    sizes: Sequence[int], first_byte: int, state_bytes: int, page_bytes: int
) -> list[list[tuple[int, int, int, int]]]:
    """Return what each page of a state has of some tensors: the tensor, its first byte there, its place in the page, and the
    number of bytes.

    sizes       of the tensors, which are one after the other from first_byte on
    """
    if state_bytes == 0:
        return []
    pages: list[list[tuple[int, int, int, int]]] = [[] for _ in range(-(-state_bytes // page_bytes))]
    for tensor, size in enumerate(sizes):
        done = 0
        while done < size:
            page, place = divmod(first_byte + done, page_bytes)
            count = min(size - done, page_bytes - place)
            pages[page].append((tensor, done, place, count))
            done += count
        first_byte += size
    return pages


def _bytes_of(array: torch.Tensor, num_blocks: int) -> NDArray[np.uint8]:
    """Return a view [num_blocks, bytes] of an array that has its blocks one after the other."""
    return array.view(num_blocks, -1).view(torch.uint8).numpy()
