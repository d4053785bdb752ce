"""HostStep: the tokens of a step as arrays on the host, as the device gets them, and how a decode step is padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import InvariantError
from quire.worker.input_batch import StepInput

Sampling = Literal["none", "plain", "cuts"]
"""What a step's launches do about its next tokens: nothing, as the host needs the logits; sample; sample with cuts (top-k)."""

Whole = TypeVar("Whole", bound=np.integer)


@dataclass(frozen=True, slots=True)
class HostStep:
    """S sequences with T tokens, one sequence after the other, of which R get a next token.

    counts            tokens of each sequence
    rows              [S] i32, lines of the device's tables; a line belongs to a sequence from its start to its end
    context_lens      [S] i32, tokens in the cache once this step is stored; 0: padding
    given_ids         [T] i64; -1: the token that the device sampled last for the sequence
    positions, slots  [T] i64; slot -1: the token's KV is stored nowhere
    logit_rows        [R] i64 tokens whose logits are wanted
    sampled_rows      [R] i32 lines of theirs
    sample_positions  [R] i64 of the tokens that will be sampled
    """

    counts: tuple[int, ...]
    rows: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    given_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    logit_rows: NDArray[np.int64]
    sampled_rows: NDArray[np.int32]
    sample_positions: NDArray[np.int64]

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one token, and gets a next one."""
        return len(self.given_ids) == len(self.counts) == len(self.logit_rows)


def host_step(step: StepInput, tables: NDArray[np.int64], block_size: int, is_on_device: NDArray[np.bool_]) -> HostStep:
    """Return the arrays of a step.

    tables        [N, max_blocks] of the batch, which hold this step's tokens
    is_on_device  [N] whether the last token of a line's sequence is the one that the device sampled last for it
    """
    runs = step.runs
    starts, ends = np.array(runs.starts), np.array(runs.ends)
    counts = np.diff(starts)
    rows = np.fromiter((row.table for row in step.rows), np.int32, len(step.rows))
    if len(runs.token_ids) == len(rows):
        token_rows, positions = rows, ends - 1
    else:
        token_rows = np.repeat(rows, counts)
        positions = np.repeat(ends - counts, counts) + np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    slots = tables[token_rows, positions // block_size] * block_size + positions % block_size
    given_ids = np.array(runs.token_ids, dtype=np.int64)
    logit_rows = np.array(step.logit_rows, dtype=np.int64)
    sampled_rows = np.fromiter((row.table for row in step.ready), np.int32, len(step.ready))
    # Only the last known token of a sequence can be one that the device has sampled.
    fed = logit_rows[is_on_device[sampled_rows]]
    given_ids[fed] = -1
    return HostStep(
        tuple(counts.tolist()),
        rows,
        ends.astype(np.int32),
        given_ids,
        positions,
        slots,
        logit_rows,
        sampled_rows,
        positions[logit_rows] + 1,
    )


def padded(step: HostStep, num_rows: int, padding_row: int) -> HostStep:
    """Return a decode step with more sequences, num_rows in all: the new ones see and store nothing."""
    missing = num_rows - len(step.counts)
    if missing < 0 or not step.is_decode:
        raise InvariantError(f"{len(step.counts)} sequences of a step cannot be padded to {num_rows}")
    return HostStep(
        step.counts + (1,) * missing,
        _extend(step.rows, missing, padding_row),
        _extend(step.context_lens, missing, 0),
        _extend(step.given_ids, missing, 0),
        _extend(step.positions, missing, 0),
        _extend(step.slots, missing, -1),
        np.arange(num_rows),
        _extend(step.sampled_rows, missing, padding_row),
        _extend(step.sample_positions, missing, 0),
    )


def full_step(num_tokens: int, num_sequences: int, context_len: int, padding_row: int) -> HostStep:
    """Return a step of padding that takes as much memory as one of real sequences: of num_tokens tokens, each sequence at least
    one; all but the first have one, and all get a next one. Nothing is stored; what is read is the padding line's blocks."""
    counts = [num_tokens - num_sequences + 1] + [1] * (num_sequences - 1)
    rows = np.full(num_sequences, padding_row, np.int32)
    return HostStep(
        tuple(counts),
        rows,
        np.maximum(np.array(counts), context_len).astype(np.int32),
        np.zeros(num_tokens, np.int64),
        np.zeros(num_tokens, np.int64),
        np.full(num_tokens, -1, np.int64),
        np.cumsum(counts) - 1,
        rows,
        np.zeros(num_sequences, np.int64),
    )


def _extend(array: NDArray[Whole], count: int, value: int) -> NDArray[Whole]:
    return np.concatenate((array, np.full(count, value, array.dtype)))
