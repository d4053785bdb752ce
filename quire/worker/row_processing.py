"""Rows whose processors and log probabilities are the executor's: what the driver tells it of them, and takes from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.contracts.step import StepResult
from quire.worker.input_batch import Row
from quire.worker.step_executor import RowProcessor


def set_processors(processor: RowProcessor | None, row: Row) -> None:
    """Tell an executor of the processors and log probabilities of a new row, if it has any and the executor samples it."""
    sampling = row.sampling
    if processor is not None and not row.is_host_sampled and (sampling.edits_logits or sampling.needs_logprob):
        processor.set_processors(row.batch_slot, sampling)


def with_device_logprobs(
    result: StepResult, processor: RowProcessor, started: Any, ready: Sequence[Row], failures: Mapping[int, str]
) -> StepResult:
    """Return a result with the log probabilities of what the executor has sampled, of the rows that ask for them.

    started   the executor's handle of the step
    ready     rows that get a token, the first of the step's logit_rows
    failures  by index, why a row has no token
    """
    rows = [
        (index, row)
        for index, row in enumerate(ready)
        if row.sampling.needs_logprob and not row.is_host_sampled and index not in failures
    ]
    if not rows:
        return result
    wanted = [(index, min(row.sampling.params.logprobs or 0, row.sampling.vocab_size)) for index, row in rows]
    found = processor.take_logprobs(started, wanted)
    own = {row.start.sequence_id: (one,) for (_, row), one in zip(rows, found, strict=True)}
    return replace(result, logprobs={**result.logprobs, **own})
