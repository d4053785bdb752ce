"""BlockPool: reference counts and the free list of the KV cache's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from quire.base.errors import ConfigError, InvariantError
from quire.base.ids import BlockId


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
    """

    def __init__(
        self,
        num_blocks: int,
        on_reuse: Callable[[BlockId], None] | None = None,
        is_kept: Callable[[BlockId], bool] | None = None,
    ) -> None:
        """Make a pool in which every block is free; num_blocks >= 1.

        on_reuse(id) is called when a block gets new content. is_kept(id) returns whether the content of a freed block can be
        found again; without it this is assumed for all blocks.
        """
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, got {num_blocks}")
        self._blocks = [_Block(index) for index in range(num_blocks)]
        self._on_reuse = on_reuse
        self._is_kept = is_kept
        self._head = _Block(-1)
        self._tail = _Block(-1)
        self._head.next, self._tail.prev = self._tail, self._head
        self._num_free = 0
        for block in self._blocks:
            self._insert(block, self._tail)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, free or held."""
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        """Free blocks, including cached ones."""
        return self._num_free

    def num_refs(self, block_id: BlockId) -> int:
        """Return how many block tables hold the block; 0: it is free."""
        return self._blocks[block_id].num_refs

    def allocate(self, num_blocks: int) -> tuple[BlockId, ...] | None:
        """Allocate the blocks that have been free the longest, with one reference each.

        None, and no change, if fewer are free.
        """
        if num_blocks > self._num_free:
            return None
        taken: list[BlockId] = []
        for _ in range(num_blocks):
            block = self._head.next
            if block is None or block is self._tail:
                raise InvariantError(f"the free list ends early, but {self._num_free} blocks are counted as free")
            self._unlink(block)
            block.num_refs = 1
            if self._on_reuse is not None:
                self._on_reuse(block.block_id)
            taken.append(block.block_id)
        return tuple(taken)

    def share(self, block_ids: Sequence[BlockId]) -> None:
        """Add a reference to each block; a free one leaves the free list with its content."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.num_refs == 0:
                self._unlink(block)
            block.num_refs += 1

    def free(self, block_ids: Sequence[BlockId]) -> None:
        """Drop a reference of each block of a table given in order.

        The last block is freed first, so it is reused first, and prefixes that many sequences share stay longest.
        """
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            if block.num_refs == 0:
                raise InvariantError(f"block {block_id} is freed, but has no references")
            block.num_refs -= 1
            if block.num_refs == 0:
                is_kept = self._is_kept is None or self._is_kept(block.block_id)
                self._insert(block, self._tail if is_kept else self._head.next)

    def iter_free(self) -> Iterator[BlockId]:
        """Yield the free blocks, the next to be allocated first. Raises InvariantError if two links disagree."""
        last, block = self._head, self._head.next
        while block is not None and block is not self._tail:
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
        self._num_free += 1

    def _unlink(self, block: _Block) -> None:
        before, after = block.prev, block.next
        if before is None or after is None:
            raise InvariantError(f"block {block.block_id} has no reference, but is not in the free list")
        before.next, after.prev = after, before
        block.prev = block.next = None
        self._num_free -= 1
