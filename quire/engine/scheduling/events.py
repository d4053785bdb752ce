"""SequenceUpdate: the scheduler's messages to the engine about a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quire.base.ids import RequestId, SequenceId
from quire.contracts.request import FinishReason
from quire.contracts.step import TokenLogprobs
from quire.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """Measurements of a sequence so far; times in seconds on the clock of the caller's `now`.

    first_scheduled_s  None if it never ran
    first_token_s      None if it has no output
    num_cached_tokens  prompt tokens from the prefix cache at its first admission; 0 for one forked from choice 0
    num_evicted_tokens tokens that its KV compression has evicted
    """

    added_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    num_cached_tokens: int
    num_preemptions: int
    num_evicted_tokens: int = 0

    @classmethod
    def of(cls, sequence: Sequence) -> SequenceStats:
        """Return the present measurements of a sequence."""
        return cls(
            added_s=sequence.added_s,
            first_scheduled_s=sequence.first_scheduled_s,
            first_token_s=sequence.first_token_s,
            num_cached_tokens=sequence.num_cached_tokens,
            num_preemptions=sequence.num_preemptions,
            num_evicted_tokens=sequence.num_evicted_tokens,
        )


class SequenceUpdate(NamedTuple):
    """An update of one sequence. Every sequence of an accepted request gets exactly one with a finish_reason, its last.

    A tuple, as one is made for every token: a frozen dataclass of as many fields takes six times as long to make.

    new_token_ids          output tokens since the last update, including a token that ended the output
    logprobs               one per new token, if requested
    prompt_logprobs        of consecutive prompt tokens, each returned once and in order, only for choice 0
    prompt_logprobs_start  prompt position of the first of them, >= 1; 0 when there are none
    pooled                 the vector of a request with pooling params, with finish_reason "stop"
    stop_reason            the stop token id or stop string; None for end of sequence
    is_ended_by_token      with finish_reason "stop": its last token ended it, and is not part of the text
    error                  why it ended with "error"; error_param: the invalid field, if the request is invalid
    start                  with the first new token, None otherwise
    stats                  with the finish_reason, None before
    """

    sequence_id: SequenceId
    request_id: RequestId
    choice: int
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs_start: int = 0
    pooled: tuple[float, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    is_ended_by_token: bool = False
    error: str | None = None
    error_param: str | None = None
    start: SequenceStats | None = None
    stats: SequenceStats | None = None
