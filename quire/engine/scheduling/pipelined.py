"""Steps for pipeline stages: each step has a share of the running sequences and of the token budget.

While one stage computes a step, the previous stage computes the next step. A sequence is in at most one step in flight, because
its next token is known only when that step is collected. So the sequences are divided among as many steps as there are stages.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.contracts.config import SchedulerConfig
from quire.engine.scheduling.in_flight import StepsInFlight
from quire.engine.scheduling.kv_allocator import KvAllocator
from quire.engine.scheduling.sequence import Sequence
from quire.engine.scheduling.sequence_queue import SequenceQueue


class StepLimits(NamedTuple):
    """The limits of one of several steps in flight."""

    num_tokens: int
    num_sequences: int


def share_of_step(config: SchedulerConfig, running: SequenceQueue, waiting: SequenceQueue, kv: KvAllocator) -> StepLimits:
    """Return the limits of one step, so that the sequences make one step of about equal size for each stage.

    Counts the running sequences, and the waiting ones that could be admitted now, ignoring cached prefixes. Never less
    than the decoding sequences of a step need, since the budget is at least max_num_seqs.
    """
    num_sequences, num_free = len(running), kv.pool.num_free
    for sequence in waiting:
        num_free -= -(-sequence.num_tokens // config.block_size)
        if num_free < 0 or num_sequences >= config.max_num_seqs:
            break
        num_sequences += 1
    num_sequences = max(1, num_sequences)
    num_steps = min(config.num_pipeline_stages, num_sequences)
    return StepLimits(-(-config.max_num_batched_tokens // num_steps), -(-num_sequences // config.num_pipeline_stages))


def find_preemptible(sequence: Sequence, running: SequenceQueue, in_flight: StepsInFlight) -> Sequence | None:
    """Return the sequence to preempt for a running one that needs a block: the last in policy order that is not in
    flight, possibly itself.

    None if a sequence in flight comes after it: that step is committed first, and then that sequence may be preempted instead.
    """
    has_later = False
    for other in reversed(running):
        if other is sequence:
            return None if has_later else sequence
        if in_flight.last_with(other.sequence_id) is None:
            return other
        has_later = True
    return None
