"""Records a step's tokens of a sequence, and decides whether they end the output.

Stop strings are found later, when the text is made.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.contracts.request import FinishReason
from quire.contracts.step import StepResult
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
