"""FilledBlocks: how much of each block holds what a proposer keeps under the target's block ids."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.contracts.step import StepPlan
from quire.speculate.chain_drafter import BlockCache


class FilledBlocks:
    """Counts, from the start of each block, the slots that hold something of the tokens which the block holds now.

    kv      where it is kept
    counts  of every block
    """

    def __init__(self, kv: BlockCache) -> None:
        self._kv, self._block_size = kv, kv.spec.block_size
        self.counts = [0] * kv.num_blocks  # a list, as they are looked at one by one

    def clear(self) -> None:
        """Count nothing as filled."""
        self.counts = [0] * len(self.counts)

    def apply(self, plan: StepPlan) -> None:
        """Take in which blocks got other tokens, and copy those that the plan copies."""
        filled = self.counts
        for _, block_id in plan.page_loads:  # pages have the target's keys and values only
            filled[block_id] = 0
        kept = [filled[source] for source, _ in plan.block_copies]
        for start in plan.starts:
            for index in range(-(-start.num_computed_tokens // self._block_size), len(start.block_ids)):
                filled[start.block_ids[index]] = 0
        for block_ids in (plan.new_block_ids or {}).values():
            for block_id in block_ids:
                filled[block_id] = 0
        for replaced in (plan.replaced_blocks or {}).values():
            for _, block_id in replaced:
                filled[block_id] = 0
        for (_, target), count in zip(plan.block_copies, kept, strict=True):
            filled[target] = count
        if plan.block_copies:
            self._kv.copy_blocks(plan.block_copies)

    def note(self, table: NDArray[np.int64], first: int, last: int) -> None:
        """Count the places [first, last) of a sequence as filled, as far as nothing before them in their blocks is missing."""
        size, filled = self._block_size, self.counts
        for index in range(first // size, -(-last // size)):
            block_id = int(table[index])
            if filled[block_id] >= first - index * size:
                filled[block_id] = max(filled[block_id], min(size, last - index * size))

    def run_before(self, table: NDArray[np.int64], place: int) -> tuple[int, int]:
        """Return the filled places [first, last) that end at `place` or one before it; first is the start of a block.

        The last place of a block may be missing: it waits for a token that whoever filled the block may never have got. Where
        nothing is filled, first and last are the start of the block of `place`.
        """
        size, filled = self._block_size, self.counts
        index = max(0, place - 1) // size
        last = min(place, index * size + filled[table[index]])
        if last < place - 1 or last == index * size:
            return place // size * size, place // size * size
        while index > 0 and filled[table[index - 1]] == size:
            index -= 1
        return index * size, last
