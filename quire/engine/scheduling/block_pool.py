"""BlockPool: reference counts and the free list of the KV cache's blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quire.base.errors import ConfigError, InvariantError
from quire.base.ids import BlockId


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Which ranks hold the blocks of a sequence. With decode context parallelism chunks of blocks go round the places; with
    attention data parallelism all blocks of a sequence are at one place, its home.

    num_places    ranks that share the tokens of a sequence, or that are homes; a pool has as many blocks at each place
    chunk_blocks  consecutive blocks of a sequence that are at one place
    has_homes     places are homes
    """

    num_places: int = 1
    chunk_blocks: int = 1
    has_homes: bool = False

    def place(self, first: int, index: int) -> int:
        """Return the place of a block by its index in the table of a sequence whose first block is at `first`."""
        return first if self.has_homes else (first + index // self.chunk_blocks) % self.num_places

    def places(self, first: int, indices: Sequence[int]) -> list[int]:
        """Return the places of several blocks."""
        return [self.place(first, index) for index in indices]


class _Block:
    """One block; prev and next link it into the free list while it is free, and are None otherwise."""

    __slots__ = ("block_id", "next", "num_refs", "prev")

    def __init__(self, block_id: int) -> None:
        self.block_id = BlockId(block_id)
        self.num_refs = 0
        self.prev: _Block | None = None
        self.next: _Block | None = None


class BlockPool:
    """A fixed number of blocks with reference counts and a free list in least-recently-used order.

    The free list is doubly linked through the blocks between two sentinels, so that a cached block in its middle can be
    reused in O(1) by a prefix hit; a deque would have to search. Blocks are taken from the head and returned to the
    tail, or to the head if their content cannot be found again: these are reused first, since a never used block
    still needs memory from the system, which can take longer than a step. A freed block keeps its content until it is
    allocated again, and only then `on_reuse` is called.

    With several places, each has an equal part of the blocks and a free list: block b is at place
    b // (num_blocks / num_places).
    """

    def __init__(
        self,
        num_blocks: int,
        on_reuse: Callable[[BlockId], None] | None = None,
        is_kept: Callable[[BlockId], bool] | None = None,
        num_places: int = 1,
    ) -> None:
        """Make a pool in which every block is free; num_blocks >= 1, a multiple of num_places.

        on_reuse(id) is called when a block gets new content. is_kept(id) returns whether the content of a freed block can be
        found again; without it this is assumed for all blocks.
        """
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, got {num_blocks}")
        if num_blocks % num_places != 0:
            raise ConfigError(f"num_blocks must be a multiple of the {num_places} places, got {num_blocks}")
        self.blocks = [_Block(index) for index in range(num_blocks)]
        self._blocks_per_place = num_blocks // num_places
        self.on_reuse = on_reuse
        self._is_kept = is_kept
        self._ends = [(_Block(-1), _Block(-1)) for _ in range(num_places)]
        for head, tail in self._ends:
            head.next, tail.prev = tail, head
        self._num_free = [0] * num_places
        for block in self.blocks:
            self._insert(block, self._ends[self.place_of(block.block_id)][1])

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, free or held."""
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Free blocks of all places, including cached ones."""
        return self._num_free[0] if len(self._num_free) == 1 else sum(self._num_free)

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0 to 1, of the fullest place."""
        return max(1.0 - num_free / self._blocks_per_place for num_free in self._num_free)

    @property
    def num_places(self) -> int:
        """Places among which the blocks are divided."""
        return len(self._num_free)

    def place_of(self, block_id: BlockId) -> int:
        """Return the place of a block."""
        return block_id // self._blocks_per_place

    def num_free_at(self, place: int) -> int:
        """Return the free blocks of one place, including cached ones."""
        return self._num_free[place]

    def has_free(self, demand: Mapping[int, int]) -> bool:
        """Return whether each place of `demand` has so many free blocks."""
        return all(count <= self._num_free[place] for place, count in demand.items())

    def num_refs(self, block_id: BlockId) -> int:
        """Return how many block tables hold the block; 0: it is free."""
        return self.blocks[block_id].num_refs

    def allocate(self, num_blocks: int) -> tuple[BlockId, ...] | None:
        """Allocate the blocks that have been free the longest, with one reference each.

        None, and no change, if fewer are free. Of a pool with one place.
        """
        if num_blocks > self._num_free[0]:
            return None
        return tuple([self._take(0) for _ in range(num_blocks)])

    def allocate_at(self, places: Sequence[int]) -> tuple[BlockId, ...] | None:
        """As `allocate`: one block at each of these places, in their order."""
        if not self.has_free(Counter(places)):
            return None
        return tuple([self._take(place) for place in places])

    def _take(self, place: int) -> BlockId:
        head, tail = self._ends[place]
        block = head.next
        if block is None or block is tail:
            raise InvariantError(f"the free list ends early, but {self._num_free[place]} blocks are counted as free")
        self._unlink(block)
        block.num_refs = 1
        if self.on_reuse is not None:
            self.on_reuse(block.block_id)
        return block.block_id

    def share(self, block_ids: Sequence[BlockId]) -> None:
        """Add a reference to each block; a free one leaves the free list with its content."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.num_refs == 0:
                self._unlink(block)
            block.num_refs += 1

    def free(self, block_ids: Sequence[BlockId], *, is_first: bool = False) -> None:
        """Drop a reference of each block of a table given in order.

        The last block is freed first, so it is reused first, and prefixes that many sequences share stay longest.
        is_first: they are reused before all others, although their content may be found again.
        """
        for block_id in reversed(block_ids):
            block = self.blocks[block_id]
            if block.num_refs == 0:
                raise InvariantError(f"block {block_id} is freed, but has no references")
            block.num_refs -= 1
            if block.num_refs == 0:
                is_kept = not is_first and (self._is_kept is None or self._is_kept(block.block_id))
                head, tail = self._ends[self.place_of(block_id)]
                self._insert(block, tail if is_kept else head.next)

    def iter_free(self) -> Iterator[BlockId]:
        """Yield the free blocks place by place, the next to be allocated first. Raises InvariantError if two links disagree."""
        for head, tail in self._ends:
            last, block = head, head.next
            while block is not None and block is not tail:
                if block.prev is not last:
                    raise InvariantError(f"the links around free block {block.block_id} disagree")
                yield block.block_id
                last, block = block, block.next
            if block is None or block.prev is not last:
                raise InvariantError("the free list does not reach its end")

    def _insert(self, block: _Block, after: _Block | None) -> None:
        """Insert a block into the list before another."""
        before = None if after is None else after.prev
        if after is None or before is None:
            raise InvariantError("the free list has lost an end")
        before.next, block.prev = block, before
        block.next, after.prev = after, block
        self._num_free[self.place_of(block.block_id)] += 1

    def _unlink(self, block: _Block) -> None:
        before, after = block.prev, block.next
        if before is None or after is None:
            raise InvariantError(f"block {block.block_id} has no reference, but is not in the free list")
        before.next, after.prev = after, before
        block.prev = block.next = None
        self._num_free[self.place_of(block.block_id)] -= 1
