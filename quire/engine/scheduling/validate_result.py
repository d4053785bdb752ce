"""What a worker may answer: a token or a vector where one is due, and no more drafts than it had slots for."""

from __future__ import annotations

from quire.contracts.step import StepResult
from quire.engine.scheduling.sequence import Sequence


def find_mistake(
    sequence: Sequence, num_tokens: int, num_draft_slots: int, result: StepResult, goes_on: bool = False
) -> str | None:
    """Return what is wrong with the worker's result for a sequence that computes num_tokens in the step.

    goes_on: the next step is planned already, so that this one may bring one token at most.
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
