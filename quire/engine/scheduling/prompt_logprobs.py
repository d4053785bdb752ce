"""Log probabilities of a prompt, each returned once, even if they are computed again after a preemption."""

from __future__ import annotations

from quire.contracts.step import StepResult, TokenLogprobs
from quire.engine.scheduling.sequence import Sequence


def take_prompt_logprobs(sequence: Sequence, result: StepResult) -> tuple[tuple[TokenLogprobs, ...], int]:
    """Return the prompt log probabilities of a chunk that were not returned before, and the position of the first.

    Call only for a sequence that still has some to return.

    Call before num_computed_tokens advances: the worker's first one is for the token after the first computed token.
    """
    due = sequence.num_prompt_tokens - sequence.next_prompt_logprob
    first = sequence.num_computed_tokens + 1
    start = max(first, sequence.next_prompt_logprob)
    taken = result.prompt_logprobs.get(sequence.sequence_id, ())[start - first :][:due]
    sequence.next_prompt_logprob = start + len(taken)
    return taken, start if taken else 0
