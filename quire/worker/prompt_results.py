"""What a step finds out about prompts: log probabilities of their tokens, and pooled hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from quire.base.ids import SequenceId
from quire.contracts.step import TokenLogprobs
from quire.sampling.logprobs import token_logprobs
from quire.worker.input_batch import PooledRun, StepInput

MAX_LOGIT_ELEMENTS = 1 << 24
"""Logits of prompt tokens held at once, for their log probabilities."""


def prompt_logprobs(
    step: StepInput, vocab_size: int, logits_at: Callable[[int, int], Tensor]
) -> dict[SequenceId, tuple[TokenLogprobs, ...]]:
    """Return the log probabilities of the prompt tokens that follow those computed in a step, where they are asked for.

    logits_at returns the logits of tokens [first, last) of the step.
    """
    found: dict[SequenceId, tuple[TokenLogprobs, ...]] = {}
    max_rows = max(1, MAX_LOGIT_ELEMENTS // vocab_size)
    starts, ends = step.tokens.starts, step.tokens.ends
    for index, row in enumerate(step.rows):
        first = ends[index] - (starts[index + 1] - starts[index])
        last = min(ends[index], row.num_prompt_tokens - 1)
        num_top = row.num_prompt_logprobs
        if num_top is None or last <= first:
            continue
        offset = starts[index] - first
        entries: list[TokenLogprobs] = []
        for begin in range(first, last, max_rows):
            end = min(begin + max_rows, last)
            logits = logits_at(offset + begin, offset + end)
            entries += token_logprobs(logits, row.token_ids[begin + 1 : end + 1], num_top)
        found[row.start.sequence_id] = tuple(entries)
    return found


def pool_hidden_states(
    runs: Sequence[PooledRun], hidden_states: Callable[[int, int], Tensor]
) -> tuple[dict[SequenceId, tuple[float, ...]], dict[SequenceId, str]]:
    """Take in the hidden states of a step; return the vectors that are complete, and why some are none.

    hidden_states returns those of [first, last) of the runs' tokens, which it counts one run after the other: f32, on the host
    """
    pooled: dict[SequenceId, tuple[float, ...]] = {}
    errors: dict[SequenceId, str] = {}
    offset = 0
    for run in runs:
        num_tokens = run.last - run.first
        run.pooler.add(hidden_states(offset, offset + num_tokens).numpy())
        offset += num_tokens
        if not run.is_complete:
            continue
        vector = run.pooler.result()
        if vector is None:
            errors[run.row.start.sequence_id] = "the pooled hidden state is not finite"
        else:
            pooled[run.row.start.sequence_id] = vector
    return pooled, errors
