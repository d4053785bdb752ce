"""Rows whose logits processors and log probabilities the executor computes: their options, and their results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from quire.base.ids import SequenceId
from quire.contracts.step import StepResult
from quire.worker.input_batch import Row, StepInput
from quire.worker.step_executor import RowProcessor

_FORCED_WORTH = 4
"""Planning a step after another one, not during it, is assumed to cost a quarter of a decode step for each row; a forced token
that is drafted saves one row of a step."""


def is_executors(row: Row) -> bool:
    """Return whether the executor can sample the tokens of a row, at once or with a mask."""
    return row.is_deferrable or not row.is_host_sampled


def set_processors(processor: RowProcessor | None, row: Row) -> None:
    """Tell an executor of the processors and log probabilities of a new row, if it has any and the executor samples it."""
    sampling = row.sampling
    if processor is not None and is_executors(row) and (sampling.edits_logits or sampling.needs_logprob):
        processor.set_processors(row.batch_slot, sampling)


def recount(
    processor: RowProcessor, ready: Sequence[Row], host_sampled: Collection[int], pending: Collection[SequenceId]
) -> None:
    """Tell an executor the outputs of rows of its own whose tokens the driver has sampled, or that got none.

    ready         rows of a step
    host_sampled  by index those that the driver has sampled
    pending       sequences without a mask: what was sampled of them is not used
    """
    for index, row in enumerate(ready):
        if row.is_deferrable and row.sampling.edits_logits and (index in host_sampled or row.start.sequence_id in pending):
            processor.set_processors(row.batch_slot, row.sampling)


def with_device_logprobs(
    result: StepResult,
    processor: RowProcessor,
    started: Any,
    ready: Sequence[Row],
    host_sampled: Collection[int],
) -> StepResult:
    """Return a result with the log probabilities of what the executor has sampled, of the rows that ask for them.

    started   the executor's handle of the step
    ready     rows that get a token, the first of the step's logit_rows
    host_sampled  the other rows, by index
    """
    rows = [
        (index, row)
        for index, row in enumerate(ready)
        if row.sampling.needs_logprob and index not in host_sampled and row.start.sequence_id in result.sampled
    ]
    if not rows:
        return result
    wanted = [(index, min(row.sampling.params.logprobs or 0, row.sampling.vocab_size)) for index, row in rows]
    found = processor.take_logprobs(started, wanted)
    own = {row.start.sequence_id: (one,) for (_, row), one in zip(rows, found, strict=True)}
    return replace(result, logprobs={**result.logprobs, **own})


def can_defer(step: StepInput, host_sampled: Sequence[int]) -> bool:
    """Return whether a step can be sampled by RowProcessor.sample_deferred.

    host_sampled  rows of step.ready, by index, that the executor does not sample at once
    """
    return bool(host_sampled) and not step.drafts and all(step.ready[index].is_deferrable for index in host_sampled)


def masks_of(ready: Sequence[Row]) -> dict[int, Tensor]:
    """Return the masks of rows that have one, by index."""
    pairs = ((index, row.sampling.token_mask) for index, row in enumerate(ready))
    return {index: mask for index, mask in pairs if mask is not None}


def prefers_drafts(step: StepInput) -> bool:
    """Return whether the tokens that constraints force, drafted after a step, may save more than planning after it costs.

    They may where most rows have constraints, since tokens that are forced after the next one are not known before it.
    """
    constrained = [row.sampling for row in step.ready if row.sampling.matcher is not None]
    num_forced = sum(max(0, len(sampling.forced_tokens()) - 1) for sampling in constrained)
    return 2 * len(constrained) > len(step.rows) or num_forced * _FORCED_WORTH >= len(step.rows)
