"""Who is preempted, and which share of the running sequences and of the token budget a step of pipeline stages has.

While one stage computes a step, the stage before it computes the next one. A sequence is in at most one step in flight, as its
next token is known only when that step is collected. So as many steps as there are stages divide the sequences among them.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.contracts.scheduler_config import SchedulerConfig
from quire.engine.scheduling.in_flight import StepsInFlight
from quire.engine.scheduling.kv_allocator import KvAllocator
from quire.engine.scheduling.sequence import Sequence
from quire.engine.scheduling.sequence_queue import SequenceQueue


def find_victim(sequence: Sequence, running: SequenceQueue) -> Sequence | None:
    """Return the sequence to preempt for a waiting one: the last running one, if it is in the background."""
    if sequence.request.is_background or len(running) == 0:
        return None
    return running.last if running.last.request.is_background else None


def must_make_room(waiting: SequenceQueue, running: SequenceQueue, kv: KvAllocator, max_num_seqs: int) -> bool:
    """Return whether a background sequence must be preempted for the next admission, ignoring cached blocks."""
    if len(waiting) == 0 or find_victim(waiting.first, running) is None:
        return False
    return len(running) >= max_num_seqs or not kv.has_room_for(waiting.first)


class StepLimits(NamedTuple):
    """The most that one of several steps in flight computes."""

    num_tokens: int
    num_sequences: int | None


def share_of_step(config: SchedulerConfig, running: SequenceQueue, waiting: SequenceQueue, kv: KvAllocator) -> StepLimits:
    """Return what one step may take, so that the sequences make a step for each stage, of about the same size.

    Counted are the running sequences, and the waiting ones that find a seat and blocks now, cached prefixes aside. Never less
    than the decoding sequences of a step need, as the budget is at least max_num_seqs.
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
    """Return the sequence to preempt for a running one that needs a block: the last in policy order that no step in flight
    computes, perhaps that one itself.

    None if a sequence in flight comes after it: its step is committed first, and then that sequence may be preempted instead.
    """
    has_later = False
    for other in reversed(running):
        if other is sequence:
            return None if has_later else sequence
        if in_flight.last_with(other.sequence_id) is None:
            return other
        has_later = True
    return None
