"""Slots for drafts: the remaining budget and blocks, in batch order, for sequences for which the worker has drafts."""

from __future__ import annotations

from quire.engine.scheduling.kv_allocator import NO_GROWTH, KvAllocator
from quire.engine.scheduling.step_plan_builder import StepPlanBuilder


def give_draft_slots(draft: StepPlanBuilder, kv: KvAllocator, num_running: int, max_num_drafts: int | None = None) -> None:
    """Give slots to the decoding sequences of a step; one block is left for each running sequence, so that none is preempted.

    max_num_drafts  of a sequence; None: as many as it requests
    """
    for sequence in draft.sequences:
        num_known = len(sequence.token_ids)
        if sequence.num_requested_drafts == 0 or num_known - sequence.num_computed_tokens != 1:
            continue
        # With every draft accepted one more token follows, and the KV of the last one is never computed.
        num_slots = min(sequence.num_requested_drafts, sequence.max_total_tokens - num_known - 1, draft.num_tokens_left)
        if sequence.short_rope_len is not None:
            num_slots = min(num_slots, sequence.short_rope_len - num_known)
        if max_num_drafts is not None:
            num_slots = min(num_slots, max_num_drafts)
        if num_slots <= 0:
            continue
        num_spare = kv.num_missing_blocks(sequence, 1 + num_slots)
        if num_spare == 0:  # it owns the blocks after that of the next token, which it can write now
            draft.add_draft_slots(sequence, num_slots, NO_GROWTH)
            continue
        if kv.pool.num_free - num_spare < num_running:
            continue
        growth = kv.grow(sequence, 1 + num_slots)
        if growth is not None:
            draft.add_draft_slots(sequence, num_slots, growth)
