"""Preemption of background sequences for waiting requests that are not in the background."""

from __future__ import annotations

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
