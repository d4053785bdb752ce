"""Records a step's tokens of a sequence, and decides whether they end the output.

Stop strings are found later, when the text is made.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.contracts.request import FinishReason
from quire.contracts.step import StepResult, TokenLogprobs
from quire.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an output ended.

    stop_reason    the stop token; None for end of sequence, for "length", and for a complete output
    is_by_token    the last token ended it, and is not part of its text
    """

    finish_reason: FinishReason
    stop_reason: int | None = None
    is_by_token: bool = False


def take_computed(sequence: Sequence, num_tokens: int, result: StepResult) -> tuple[tuple[int, ...], Ending | None]:
    """Record the result of a step of num_tokens tokens of a sequence; return the new tokens and how they ended it."""
    sequence.is_mask_pending = sequence.sequence_id in result.mask_pending
    sequence.num_computed_tokens += num_tokens - sequence.is_mask_pending
    if result.verified:
        sequence.num_computed_tokens += result.verified.get(sequence.sequence_id, (0, 0))[1]
    sequence.num_requested_drafts = result.draft_requests.get(sequence.sequence_id, 0)
    is_complete = sequence.sequence_id in result.completed
    token_ids, ending = _append_sampled(sequence, result.sampled.get(sequence.sequence_id, ()), is_complete)
    if ending is not None:  # drafts after the end may have been accepted
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, sequence.num_tokens - 1)
    return token_ids, ending


def _append_sampled(sequence: Sequence, token_ids: tuple[int, ...], is_complete: bool) -> tuple[tuple[int, ...], Ending | None]:
    """Append sampled tokens up to the one that ends the output; return what was appended and how it ended.

    is_complete: nothing can follow the last of them, which ends the output even before min_tokens.

    An ending token ends the output once there are min_tokens, including itself. A token that is both the last one allowed
    and an ending token counts as "stop"; one that is both end of sequence and a stop token, as end of sequence.
    """
    request, known_ids = sequence.request, sequence.token_ids
    for index, token_id in enumerate(token_ids):
        known_ids.append(token_id)
        if token_id in sequence.ending_token_ids and sequence.num_output_tokens >= request.params.min_tokens:
            is_eos = token_id in request.eos_token_ids and not request.params.ignore_eos
            return token_ids[: index + 1], Ending("stop", None if is_eos else token_id, is_by_token=True)
        if is_complete and index == len(token_ids) - 1:
            return token_ids, Ending("stop")
        if len(known_ids) >= sequence.max_total_tokens:
            return token_ids[: index + 1], Ending("length")
    return token_ids, None


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


def take_prompt_logprobs(sequence: Sequence, result: StepResult) -> tuple[tuple[TokenLogprobs, ...], int]:
    """Return the prompt log probabilities of a chunk that were not handed out before, and the position of the first.

    For a sequence with some still to hand out.
    To be called before num_computed_tokens advances: the worker's first one is of the token after the first computed.
    """
    due = sequence.num_prompt_tokens - sequence.next_prompt_logprob
    first = sequence.num_computed_tokens + 1
    start = max(first, sequence.next_prompt_logprob)
    taken = result.prompt_logprobs.get(sequence.sequence_id, ())[start - first :][:due]
    sequence.next_prompt_logprob = start + len(taken)
    return taken, start if taken else 0
