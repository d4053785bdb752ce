"""FilledBlocks: how many slots of each block are filled in a cache of a proposer that uses the target's block ids."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.contracts.step import StepPlan
from quire.speculate.chain_drafter import BlockCache


class FilledBlocks:
    """Counts the leading slots of each block that are filled for the tokens which the block holds now.

    kv      the proposer's cache
    counts  per block
    """

    def __init__(self, kv: BlockCache) -> None:
        self._kv, self._block_size = kv, kv.spec.block_size
        self.counts = [0] * kv.num_blocks  # a list, because single elements are read

    def clear(self) -> None:
        """Count nothing as filled."""
        self.counts = [0] * len(self.counts)

    def apply(self, plan: StepPlan) -> None:
        """Reset the blocks that the plan gives to other tokens, and copy the blocks that it copies."""
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
        """Mark the positions [first, last) of a sequence as filled, in blocks without a gap before them."""
        size, filled = self._block_size, self.counts
        for index in range(first // size, -(-last // size)):
            block_id = int(table[index])
            if filled[block_id] >= first - index * size:
                filled[block_id] = max(filled[block_id], min(size, last - index * size))

    def run_before(self, table: NDArray[np.int64], place: int) -> tuple[int, int]:
        """Return the filled range [first, last) that ends at `place` or one before it; first is the start of a block.

        The last position of a block may be missing: the sequence that filled the block may never have got the token that this
        position reads. If nothing is filled, first and last are the start of the block of `place`.
        """
        size, filled = self._block_size, self.counts
        index = max(0, place - 1) // size
        last = min(place, index * size + filled[table[index]])
        if last < place - 1 or last == index * size:
            return place // size * size, place // size * size
        while index > 0 and filled[table[index - 1]] == size:
            index -= 1
        return index * size, last
