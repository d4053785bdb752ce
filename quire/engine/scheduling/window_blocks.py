"""WindowBlocks: the blocks of sliding-window layers, which keep the KV of only the last tokens of a sequence.

The layers of a model are in two KV cache groups with a pool each. Layers with a window are in the window group; all others are
in the full group, whose blocks the block tables and the prefix index name. Each block of the full group may have one window
block, that of the same tokens. So a window block is shared, copied and found again together with its block.

A sequence holds the window blocks [window_first, window_end) of its table: those that its next tokens attend to, and those that
they write. A window block that is no longer held can be hit while its block is published and nothing else is written to it.
Kept longest are the windows at which prompts are likely to continue: at the end of a prompt, at the end of an output, and
where a prompt was found to diverge from earlier ones. Window blocks between these are reused first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from quire.base.errors import InvariantError
from quire.base.ids import BlockId
from quire.contracts.step import TableRun
from quire.engine.scheduling.block_pool import BlockPool
from quire.engine.scheduling.prefix_index import PrefixEntry
from quire.engine.scheduling.sequence import Sequence


class WindowLimits(NamedTuple):
    """The size of the window group.

    window_tokens  the largest window of a layer
    peak_blocks    the most window blocks that one sequence holds in a step
    """

    num_blocks: int
    window_tokens: int
    peak_blocks: int


class WindowBlocks:
    """The pool of the window group, and which of its blocks belongs to which block; used by KvAllocator only.

    is_published  returns whether a block of the full group is in the prefix index
    """

    def __init__(self, limits: WindowLimits, block_size: int, is_published: Callable[[BlockId], bool]) -> None:
        num_blocks, self._window_tokens, self.peak_blocks = limits
        self._block_size = block_size
        self._is_published = is_published
        self._window_of: dict[BlockId, BlockId] = {}
        self._block_of: dict[BlockId, BlockId] = {}
        self.pool = BlockPool(num_blocks, on_reuse=self._reuse, is_kept=self._is_kept)

    def of(self, block_id: BlockId) -> BlockId | None:
        """Return the window block of a block; None if it has none (any more)."""
        return self._window_of.get(block_id)

    def first_needed(self, num_computed_tokens: int) -> int:
        """Return the first block of a table that the tokens after the computed ones attend to.

        One token more is kept than they see, because a fork computes the last token of the prompt again.
        """
        return max(0, num_computed_tokens - self._window_tokens) // self._block_size

    def cut(self, hits: list[PrefixEntry]) -> list[PrefixEntry]:
        """Return the longest prefix of hits whose last window has all of its window blocks."""
        length = index = len(hits)
        while index > self.first_needed(length * self._block_size):
            index -= 1
            if hits[index].block_id not in self._window_of:
                length = index
        return hits[:length]

    def num_wanted(self, hit_ids: list[BlockId], num_new: int) -> int:
        """Return how many free window blocks a sequence needs that starts with these hits and has num_new more blocks."""
        held = self._hit_blocks(hit_ids)
        num_revived = sum(self.pool.num_refs(window_id) == 0 for window_id in held)
        return num_revived + min(num_new, max(0, self.peak_blocks - len(held)))

    def _hit_blocks(self, hit_ids: list[BlockId]) -> list[BlockId]:
        first = self.first_needed(len(hit_ids) * self._block_size)
        return [self._window_of[block_id] for block_id in hit_ids[first:]]

    def start(self, sequence: Sequence, hit_ids: list[BlockId], num_matched: int) -> None:
        """Let an admitted sequence hold the window blocks of its hits, which `cut` has left of num_matched."""
        sequence.num_shared_tokens = num_matched * self._block_size
        self.pool.share(self._hit_blocks(hit_ids))
        sequence.window_first = self.first_needed(len(hit_ids) * self._block_size)
        sequence.window_end = len(hit_ids)

    def num_missing(self, sequence: Sequence, num_blocks: int, locked: list[int]) -> int:
        """Return how many window blocks a sequence needs to hold those of its first num_blocks blocks, of which `locked` are
        replaced."""
        return max(0, num_blocks - sequence.window_end) + sum(index < sequence.window_end for index in locked)

    def extend(self, sequence: Sequence, num_blocks: int) -> tuple[TableRun, ...]:
        """Allocate the window blocks of the first num_blocks blocks of a table; the caller has counted them as free."""
        first = sequence.window_end
        if num_blocks <= first:
            return ()
        window_ids = self._allocate(num_blocks - first)
        for block_id, window_id in zip(sequence.block_ids[first:num_blocks], window_ids, strict=True):
            self._join(block_id, window_id)
        sequence.window_end = num_blocks
        return ((first, window_ids),)

    def replace(self, old_id: BlockId, new_id: BlockId) -> tuple[BlockId, BlockId]:
        """Give a block that replaces another in a table a window block; return the old and the new window block."""
        old_window_id = self._window_of[old_id]
        (window_id,) = self._allocate(1)
        self._join(new_id, window_id)
        self.pool.free([old_window_id])
        return old_window_id, window_id

    def advance(self, sequence: Sequence) -> None:
        """Free the window blocks that the tokens after the computed ones no longer attend to."""
        first = self.first_needed(sequence.num_computed_tokens)
        if first <= sequence.window_first:
            return
        ends = ((sequence.num_prompt_tokens - 1) // self._block_size, sequence.num_shared_tokens // self._block_size)
        spans = [range(self.first_needed(end * self._block_size), end) for end in ends]
        for index in range(sequence.window_first, first):
            is_kept = any(index in span for span in spans)
            self.pool.free(self._held(sequence, index, index + 1), is_first=not is_kept)
        sequence.window_first = first

    def held(self, sequence: Sequence) -> list[BlockId]:
        """Return the window blocks that a sequence holds, in order."""
        return self._held(sequence, sequence.window_first, sequence.window_end)

    def _held(self, sequence: Sequence, first: int, end: int) -> list[BlockId]:
        return [self._window_of[block_id] for block_id in sequence.block_ids[first:end]]

    def detach(self, sequence: Sequence) -> list[BlockId]:
        """Remove all window blocks from a sequence that still has its table, and return them in order, to be freed later."""
        window_ids = self.held(sequence)
        sequence.window_first = sequence.window_end = sequence.num_shared_tokens = 0
        return window_ids

    def fork(self, source: Sequence, target: Sequence) -> None:
        """Let `target`, which has got a part of the table of `source`, share its window blocks."""
        target.window_first = source.window_first
        target.window_end = min(source.window_end, len(target.block_ids))
        self.pool.share(self.held(target))

    def forget(self, block_id: BlockId) -> None:
        """Drop the window block of a block that gets new content."""
        window_id = self._window_of.pop(block_id, None)
        if window_id is None:
            return
        del self._block_of[window_id]
        if self.pool.num_refs(window_id) > 0:
            raise InvariantError(f"block {block_id} gets new content, but its window block {window_id} is held")
        self.pool.share([window_id])  # and to the head of the free list, as its content cannot be found any more
        self.pool.free([window_id])

    def find_problem(self) -> str | None:
        """Return what contradicts itself in the pairs of blocks; None if nothing does."""
        if {window_id: block_id for block_id, window_id in self._window_of.items()} != self._block_of:
            return "has pairs that disagree"
        num_free = len(list(self.pool.iter_free()))
        return None if num_free == self.pool.num_free else f"counts {self.pool.num_free} free blocks, but {num_free} are"

    def _join(self, block_id: BlockId, window_id: BlockId) -> None:
        if block_id in self._window_of:
            raise InvariantError(f"block {block_id} has a window block already")
        self._window_of[block_id], self._block_of[window_id] = window_id, block_id

    def _reuse(self, window_id: BlockId) -> None:
        block_id = self._block_of.pop(window_id, None)
        if block_id is not None:
            del self._window_of[block_id]

    def _is_kept(self, window_id: BlockId) -> bool:
        block_id = self._block_of.get(window_id)
        return block_id is not None and self._is_published(block_id)

    def _allocate(self, num_blocks: int) -> tuple[BlockId, ...]:
        window_ids = self.pool.allocate(num_blocks)
        if window_ids is None:
            raise InvariantError(f"{num_blocks} window blocks were counted as free, but {self.pool.num_free} are")
        return window_ids
