"""Checks a worker's result: a token or a vector exactly when one is due, and at most as many drafts as slots."""

from __future__ import annotations

from quire.contracts.step import StepResult
from quire.engine.scheduling.sequence import Sequence


def find_mistake(
    sequence: Sequence, num_tokens: int, num_draft_slots: int, result: StepResult, goes_on: bool = False
) -> str | None:
    """Return the error in the worker's result for a sequence that computes num_tokens in the step, None if it is valid.

    goes_on: the next step is already planned, so this one may return at most one token.
    """
    if goes_on and len(result.sampled.get(sequence.sequence_id, ())) > 1:
        return "the worker returned several tokens where the next step was planned for one"
    if result.verified:
        num_drafts, num_accepted = result.verified.get(sequence.sequence_id, (0, 0))
        num_sampled = len(result.sampled.get(sequence.sequence_id, ()))
        if num_drafts > num_draft_slots or num_accepted > min(num_drafts, max(0, num_sampled - 1)):
            return (
                f"the worker accepted {num_accepted} of {num_drafts} drafts in {num_draft_slots} slots, of {num_sampled} tokens"
            )
    is_due = sequence.num_computed_tokens + num_tokens == len(sequence.token_ids)
    is_pooled = sequence.request.pooling is not None
    if sequence.sequence_id in result.mask_pending:
        is_allowed = is_due and not is_pooled and not goes_on
        is_due = False
        if not is_allowed:
            return "the worker says that a mask is pending where no token was due"
    has_token, has_vector = bool(result.sampled.get(sequence.sequence_id)), sequence.sequence_id in result.pooled
    if has_token != (is_due and not is_pooled):
        return _describe_mistake("token", has_token)
    if has_vector != (is_due and is_pooled):
        return _describe_mistake("pooled vector", has_vector)
    return None


def _describe_mistake(name: str, has: bool) -> str:
    return f"the worker returned {'a' if has else 'no'} {name} where {'none' if has else 'one'} was due"
