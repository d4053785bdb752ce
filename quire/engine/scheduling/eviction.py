"""EvictionRule: when a sequence with KV compression loses blocks, and which ones.

A sequence loses blocks at lengths that follow from its request only, so the same tokens see the same keys however the prompt is
cut into chunks, whatever else is in the batch, and after a preemption: no step computes tokens on both sides of such a length.
The dropped blocks leave the block table, and the places of later tokens in the cache move up: a token's position, which its
rope depends on, is its place plus Sequence.num_dropped_tokens.

A dropped block is only taken out of this table. Blocks that other sequences share, or that the prefix index has, keep their
content. Tokens up to the first eviction were computed with full attention and are published; no later block is, see
KvAllocator.publish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.base.errors import InvariantError
from quire.contracts.kv_compression import KvCompression


@dataclass(frozen=True, slots=True)
class EvictionRule:
    """The compression of one sequence in blocks. Lengths count computed tokens, from the start of the sequence.

    first_len        the first eviction follows at this length or later
    budget_tokens    tokens to keep; None: as many as the attention asks for
    num_sink_blocks  blocks at the start that are kept
    recent_tokens    last tokens whose blocks are kept
    """

    compression: KvCompression
    block_size: int
    first_len: int
    budget_tokens: int | None
    num_sink_blocks: int
    recent_tokens: int

    @classmethod
    def of(cls, compression: KvCompression | None, num_prompt_tokens: int, block_size: int) -> EvictionRule | None:
        """Return the rule of a request; None: it keeps all blocks."""
        if compression is None or not compression.evicts:
            return None
        return cls(
            compression,
            block_size,
            compression.first_len(num_prompt_tokens),
            compression.budget(num_prompt_tokens, block_size),
            -(-compression.sink_tokens // block_size),
            compression.recent_tokens if compression.needs_scores else 1,
        )

    @property
    def max_cached_tokens(self) -> int:
        """Tokens that may come from the prefix cache: the step that reaches first_len must be computed, and all whose attention
        is read."""
        return max(0, self.first_len - (self.recent_tokens if self.compression.observes_attention else 1))

    def next_len(self, num_computed: int, num_dropped: int) -> int | None:
        """Return the next length at which blocks are evicted; None: there is none."""
        budget = self.budget_tokens
        if num_computed < self.first_len and (budget is None or self.first_len > budget):
            return self.first_len
        if budget is None or not self.compression.is_continuing:
            return None
        return max(num_computed + 1, budget + num_dropped + 1)

    def limit_chunk(self, num_tokens: int, num_computed: int, num_dropped: int) -> int:
        """Return how many of num_tokens a step may compute, so that it does not go beyond the next eviction."""
        next_len = self.next_len(num_computed, num_dropped)
        return num_tokens if next_len is None else min(num_tokens, next_len - num_computed)

    def evictable(self, num_computed: int, num_dropped: int) -> range:
        """Return the indices in the block table from which blocks may be evicted."""
        stop = (num_computed - num_dropped - self.recent_tokens) // self.block_size
        return range(self.num_sink_blocks, max(self.num_sink_blocks, stop))

    def num_scored(self, num_computed: int, num_dropped: int) -> int:
        """Return how many first blocks of the table need scores; where attention is observed all, as its sum is needed."""
        if self.compression.observes_attention:
            return -(-(num_computed - num_dropped) // self.block_size)
        return self.evictable(num_computed, num_dropped).stop

    def choose(self, num_computed: int, num_dropped: int, scores: Sequence[float] | None) -> tuple[int, ...]:
        """Return the indices of the blocks to evict at an eviction length, ascending.

        scores  of the first num_scored() blocks of the table, of which the lowest go first; None: the oldest do
        """
        places = list(self.evictable(num_computed, num_dropped))
        if scores is not None:
            places.sort(key=lambda index: scores[index])  # stable: of equal ones the oldest
        if self.budget_tokens is not None:
            num_excess = -(-max(0, num_computed - num_dropped - self.budget_tokens) // self.block_size)
            return tuple(sorted(places[:num_excess]))
        mass = self.compression.attention_mass
        if scores is None or mass is None:
            raise InvariantError("blocks are chosen without a budget, and without the attention that they get")
        left = (1.0 - mass) * math.fsum(scores)
        chosen: list[int] = []
        for index in places:
            left -= scores[index]
            if left < 0.0:
                break
            chosen.append(index)
        return tuple(sorted(chosen))

    def peak_tokens(self, num_tokens: int) -> int:
        """Return the most tokens that the cache holds of a sequence while its first num_tokens are computed."""
        budget = self.budget_tokens
        if num_tokens <= self.first_len or budget is None:
            return num_tokens
        if self.compression.is_continuing:
            return min(num_tokens, max(self.first_len, budget + 1))
        return max(self.first_len, min(self.first_len, budget) + num_tokens - self.first_len)

    def longest(self, num_slots: int) -> int | None:
        """Return how many tokens of a sequence can be computed with num_slots places in the cache; None: any number."""
        budget = self.budget_tokens
        if budget is None or num_slots < self.first_len:
            return num_slots
        if self.compression.is_continuing:
            return None if max(self.first_len, budget + 1) <= num_slots else num_slots
        return num_slots + max(0, self.first_len - budget)
