"""DevicePages: copies of KV blocks between a pool on a GPU and the host tier, next to the steps."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.base.errors import WorkerError
from quire.kernels.triton.page_copy import copy_pages_launch
from quire.kernels.triton.step import send_together
from quire.kv.device_pool import DeviceKvPool
from quire.kv.tiers.host_slab import HostSlab, staged_pages, state_pieces


class Mark(Protocol):
    """The end of work that was given to a CopyStream."""

    @property
    def is_done(self) -> bool:
        """Whether the work is done."""
        ...

    @property
    def seconds(self) -> float:
        """How long it has taken, once it is done."""
        ...

    def wait(self) -> None:
        """Have the steps that are launched from now on wait for it."""
        ...

    def synchronize(self) -> None:
        """Return when it is done."""
        ...


class CopyStream(Protocol):
    """Runs copies in their order, next to the steps."""

    def run(self, work: Callable[[], None], after: Iterable[Mark]) -> Mark:
        """Start work after all steps that were launched so far, and after these marks."""
        ...


class HostCopyStream:
    """Implements CopyStream, and Mark, where the pool is on the host: work is done at once."""

    is_done = True
    seconds = 0.0

    def run(self, work: Callable[[], None], after: Iterable[Mark]) -> Mark:
        """See CopyStream."""
        work()
        return self

    def wait(self) -> None:
        """See Mark."""

    def synchronize(self) -> None:
        """See Mark."""


class CudaCopyStream:
    """Implements CopyStream with a stream of a CUDA device, which has to be the current one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], None], after: Iterable[Mark]) -> Mark:
        """See CopyStream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        for mark in after:
            assert isinstance(mark, CudaMark)
            self._stream.wait_event(mark.end)
        with torch.cuda.stream(self._stream):
            mark = CudaMark(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            mark.start.record()
            work()
            mark.end.record()
        return mark


@dataclass(frozen=True, slots=True)
class CudaMark:
    """Implements Mark with events before and after the work."""

    start: torch.cuda.Event
    end: torch.cuda.Event

    @property
    def is_done(self) -> bool:
        """See Mark."""
        return self.end.query()

    @property
    def seconds(self) -> float:
        """See Mark."""
        return self.start.elapsed_time(self.end) / 1e3

    def wait(self) -> None:
        """See Mark."""
        torch.cuda.current_stream().wait_event(self.end)

    def synchronize(self) -> None:
        """See Mark."""
        self.end.synchronize()


@dataclass(frozen=True, slots=True)
class _Move:
    """The copies of one step. slots: of the host tier, blocks: of the device, which they read or write."""

    step_id: int
    saves: Sequence[Mark]
    loads: Sequence[Mark]
    save_slots: frozenset[int]
    load_slots: frozenset[int]
    load_blocks: frozenset[int]

    @property
    def marks(self) -> Sequence[Mark]:
        return (*self.saves, *self.loads)


@dataclass(frozen=True, slots=True)
class PageShare:
    """What a rank has of the pages of a model that several GPUs of one host share.

    A page has the shares of all ranks, one after the other: each rank copies its own, and all share the memory of the slots.

    file        descriptor of the memory of all slots, see `slots_file`
    page_bytes  of a whole page
    first_byte  of the rank's share, which is as large as a block of its pool
    """

    file: int
    page_bytes: int
    first_byte: int


class DevicePages:
    """Saves blocks of a pool to slots of the host tier, and loads them, each in a stream of its own.

    A save first gathers its blocks in a buffer on the device, in the stream of the steps. That takes microseconds, and a later
    step may then write the blocks; from the buffer they are copied to the host while steps run. A load is copied into another
    buffer, and from there into its blocks, in the stream of loads; steps that use these blocks wait for it, see `use`.

    A page has all arrays of a block, layer by layer: key, value, and their scales; or a part of a recurrent state, see
    HostSlab.
    """

    def __init__(
        self,
        pool: DeviceKvPool,
        slab: HostSlab,
        make_stream: Callable[[], CopyStream] | None = None,
        first_byte: int = 0,
        num_checkpoints: int = 0,
    ) -> None:
        """Take the buffers, and pin the memory of the slab.

        make_stream  None: as the device of the pool has them
        first_byte   of the pool's share of a page, see PageShare
        num_checkpoints  the last rows of the pool's recurrent states, which are saved and loaded
        Raises WorkerError where the memory cannot be pinned.
        """
        self._pool, self._slab, self._layout = pool, slab, pool.page_layout()
        num_bytes = pool.spec.page_bytes
        self._states = [tensor for layer in pool.states for tensor in layer if num_checkpoints and tensor.numel() > 0]
        sizes = [tensor.nbytes // len(tensor) for tensor in self._states]
        self._state_pieces = state_pieces(sizes, 0, sum(sizes), num_bytes)
        self._num_checkpoints = num_checkpoints
        self._slots = torch.from_numpy(slab.slots())[:, first_byte : first_byte + num_bytes]
        num_places = staged_pages(num_bytes, slab.num_slots)
        self._saved, self._loaded = (
            torch.empty(count, num_bytes, dtype=torch.uint8, device=pool.device) for count in num_places
        )
        is_cuda = pool.device.type == "cuda"
        make = make_stream or ((lambda: CudaCopyStream(pool.device)) if is_cuda else HostCopyStream)
        self._save_stream, self._load_stream = make(), make()
        self._next_place = 0
        self._readers: list[Mark | None] = [None] * num_places[0]  # that copy a place of the buffer of saves to the host
        self._moves: deque[_Move] = deque()
        if is_cuda:
            _pin(self, slab.address, slab.num_slots * slab.stride)

    def warm_up(self) -> None:
        """Compile the kernels, and start the streams, before anything waits for them; no block may be in use. Slot 0 keeps its
        page."""
        block_id = 0 if self._pool.spec.bytes_per_block else self._pool.num_blocks
        self.move(0, [], [(0, block_id)])
        self.move(0, [(block_id, 0)], [])
        self.settle()
        self.take_done()
        self._slab.save_s = self._slab.load_s = 0.0

    def move(self, step_id: int, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> None:
        """Start to copy blocks to slots, (block, slot), as they stand now, and then slots to blocks, (slot, block).

        Called in the stream of the steps, before the step is launched. `take_done` returns step_id when all of it is done.
        """
        save_slots, load_slots = (frozenset(slots) for slots in ([slot for _, slot in saves], [slot for slot, _ in loads]))
        self.use(block_id for block_id, _ in saves)
        of_saves = [mark for move in self._moves if not move.load_slots.isdisjoint(save_slots) for mark in move.loads]
        saved = [self._save(group, of_saves) for group in _groups(saves, len(self._saved))]
        of_loads = [mark for move in self._moves if not move.save_slots.isdisjoint(load_slots) for mark in move.saves]
        if not save_slots.isdisjoint(load_slots):
            of_loads += saved
        loaded = [self._load(group, of_loads) for group in _groups(loads, len(self._loaded))]
        load_blocks = frozenset(block_id for _, block_id in loads)
        self._moves.append(_Move(step_id, saved, loaded, save_slots, load_slots, load_blocks))

    def use_states(self, checkpoints: Iterable[int]) -> None:
        """Have the steps that are launched from now on wait for loads into these checkpoints."""
        count = len(self._state_pieces)
        firsts = (self._pool.num_blocks + checkpoint * count for checkpoint in checkpoints if self._moves)
        self.use(first + page for first in firsts for page in range(count))

    def use(self, block_ids: Iterable[int]) -> None:
        """Have the steps that are launched from now on wait for loads into these blocks."""
        if not self._moves:
            return
        wanted = frozenset(block_ids)
        for move in self._moves:
            if not move.load_blocks.isdisjoint(wanted):
                for mark in move.loads:
                    mark.wait()

    def take_done(self) -> tuple[int, ...]:
        """Return the steps whose copies are done, in order; each once."""
        found: list[int] = []
        while self._moves and all(mark.is_done for mark in self._moves[0].marks):
            move = self._moves.popleft()
            self._slab.save_s += sum(mark.seconds for mark in move.saves)
            self._slab.load_s += sum(mark.seconds for mark in move.loads)
            found.append(move.step_id)
        return tuple(found)

    def settle(self) -> None:
        """Wait until all copies are done."""
        for move in self._moves:
            for mark in move.marks:
                mark.synchronize()

    def _save(self, saves: Sequence[tuple[int, int]], after: Iterable[Mark]) -> Mark:
        count = len(self._saved)
        places = [(self._next_place + index) % count for index in range(len(saves))]
        self._next_place = (places[-1] + 1) % count
        readers = {id(mark): mark for place in places if (mark := self._readers[place]) is not None}
        for mark in readers.values():
            mark.wait()
        self._copy(self._saved, [block_id for block_id, _ in saves], places, to_pages=True)

        def work() -> None:
            for slot, place, end in self._runs([slot for _, slot in saves], places):
                self._slots[slot : slot + end - place].copy_(self._saved[place:end], non_blocking=True)

        mark = self._save_stream.run(work, after)
        for place in places:
            self._readers[place] = mark
        return mark

    def _load(self, loads: Sequence[tuple[int, int]], after: Iterable[Mark]) -> Mark:
        def work() -> None:
            for slot, place, end in self._runs([slot for slot, _ in loads], range(len(loads))):
                self._loaded[place:end].copy_(self._slots[slot : slot + end - place], non_blocking=True)
            self._copy(self._loaded, [block_id for _, block_id in loads], range(len(loads)), to_pages=False)

        return self._load_stream.run(work, after)

    def _runs(self, slots: Sequence[int], places: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return which pages are copied at once: the first slot, the first place and the last one, exclusively.

        Pages that follow one another in both are, where the slots have no gaps between them: each copy takes the host time.
        """
        found: list[tuple[int, int, int]] = []
        for slot, place in zip(slots, places, strict=True):
            if found and self._slots.is_contiguous():
                first_slot, first, end = found[-1]
                if place == end and slot == first_slot + end - first:
                    found[-1] = first_slot, first, end + 1
                    continue
            found.append((slot, place, place + 1))
        return found

    def _copy(self, pages: Tensor, block_ids: Sequence[int], places: Sequence[int], to_pages: bool) -> None:
        pairs = list(zip(block_ids, places, strict=True))
        for block_id, place in pairs:
            if block_id >= self._pool.num_blocks:
                self._copy_state(pages[place], block_id - self._pool.num_blocks, to_pages)
        blocks = [pair for pair in pairs if pair[0] < self._pool.num_blocks]
        if not blocks:
            return
        numbers = torch.tensor(blocks, dtype=torch.int64)
        own, there = send_together([numbers[:, 0], numbers[:, 1]], self._pool.device)
        copy_pages_launch(self._pool.memory, pages, self._layout, own, there, to_pages).run()

    def _copy_state(self, page: Tensor, number: int, to_pages: bool) -> None:
        checkpoint, part = divmod(number, len(self._state_pieces))
        for index, first, place, size in self._state_pieces[part]:
            rows = self._states[index]
            row = rows[len(rows) - self._num_checkpoints + checkpoint].view(-1).view(torch.uint8)
            copied = (page[place : place + size], row[first : first + size])
            target, source = copied if to_pages else copied[::-1]
            target.copy_(source)


def _groups(pairs: Sequence[tuple[int, int]], size: int) -> list[Sequence[tuple[int, int]]]:
    return [pairs[first : first + size] for first in range(0, len(pairs), size)]


def _pin(owner: DevicePages, address: int, num_bytes: int) -> None:
    """Pin host memory, so that copies run next to steps, for as long as its owner lives. Raises WorkerError."""
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(address, num_bytes, 0)
    if int(error) != 0:
        raise WorkerError(f"the {num_bytes} bytes of the host tier cannot be pinned ({error}): lower kv_host_bytes")
    weakref.finalize(owner, runtime.cudaHostUnregister, address)
