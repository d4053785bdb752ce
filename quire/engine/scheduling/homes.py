"""Homes: with attention data parallelism one rank attends to a sequence, and holds all its keys and values.

There is one scheduler for all homes, and one plan has the sequences of all of them. Each home has an equal part of the blocks,
a prefix cache, and a token budget, so that the ranks have about as much attention to compute in each step.
"""

from __future__ import annotations

from quire.contracts.scheduler_config import SchedulerConfig
from quire.engine.scheduling.block_pool import BlockLayout
from quire.engine.scheduling.kv_allocator import KvAllocator
from quire.engine.scheduling.sequence import Sequence
from quire.engine.scheduling.sequence_queue import SequenceQueue
from quire.engine.scheduling.step_plan_builder import StepPlanBuilder


def block_layout(config: SchedulerConfig) -> BlockLayout:
    """Return which ranks hold the blocks of a sequence."""
    if config.num_homes > 1:
        return BlockLayout(config.num_homes, has_homes=True)
    return BlockLayout(config.num_block_places, config.block_chunk)


def home_budget(config: SchedulerConfig) -> int | None:
    """Return the most tokens of one home in a step; None without homes.

    Never below max_num_seqs: all running sequences may be at one home, and decoding ones must leave room for prompts.
    """
    if config.num_homes == 1:
        return None
    return max(-(-config.max_num_batched_tokens // config.num_homes), config.max_num_seqs)


def admit_at_home(sequence: Sequence, kv: KvAllocator, draft: StepPlanBuilder) -> int | None:
    """Admit a sequence at the best home that has blocks and tokens for it; see KvAllocator.admit.

    The best home is the one with the fewest tokens in the step after its prefix cache is used; of equal ones the one with the
    most free blocks. The prefix cache of a home counts only while the home has about as few sequences as the others: all
    sequences with one common prefix would be at one home otherwise.
    """
    if not kv.layout.has_homes:
        return kv.admit(sequence)

    counts = draft.num_home_sequences()
    most_for_cache = min(counts) + 1 + min(counts) // 4

    def cost(home: int) -> tuple[int, int]:
        num_cached = kv.num_cached_tokens(sequence, home) if counts[home] <= most_for_cache else 0
        return draft.num_home_tokens[home] - num_cached, -kv.pool.num_free_at(home)

    homes = [home for home in range(kv.layout.num_places) if draft.tokens_left(home) > 0]
    for home in sorted(homes, key=cost):
        num_cached = kv.admit(sequence, home)
        if num_cached is not None:
            return num_cached
    return None


def last_of_home(sequence: Sequence, running: SequenceQueue) -> Sequence:
    """Return the last running sequence in policy order that is at the home of a running one, perhaps itself."""
    return next(other for other in reversed(running) if other.home == sequence.home)
