"""HostStep: the tokens of a step as arrays on the host, and how they are written where the device gets them, with padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import InvariantError
from quire.kernels.reference.recurrent import StateRows, place_saves
from quire.model.lora.numbers import NO_ADAPTER
from quire.model.token_runs import TreePlaces, run_places, short_rope_tokens
from quire.worker.step_executor import StepTokens

Sampling = Literal["full", "cuts", "plain", "deferred"]
"""How a step samples: without cuts; with cuts (top-k, top-p, min-p), too; also with logits processors and log probabilities,
which is right for all rows; or not, as further launches sample its logits."""

STATE_ARRAYS = ("state_sources", "state_saves", "state_checkpoints")
"""The fields of DeviceStateRows."""

_NO_TREES = TreePlaces(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.uint64))

SAMPLINGS: tuple[Sampling, ...] = ("full", "cuts", "plain", "deferred")
"""All of them, what takes most memory first."""


@dataclass(frozen=True, slots=True)
class HostStep:
    """S sequences with T tokens, one sequence after the other. A token is sampled after R of them: the last known one of a
    sequence that gets a next token, and each draft.

    counts            tokens of each sequence
    rows              [S] i32, batch slots: rows of the device's tables; a slot belongs to a sequence from its start to its end
    context_lens      [S] i32, tokens in the cache once this step is stored; 0: padding
    given_ids         [T] i64; -1: the token that the device sampled last for the sequence
    positions, slots  [T] i64; slot -1: the token's KV is stored nowhere. Drafts of a tree have the positions of their depths.
                      Tokens with the short variant of a rope have rows of the rope table that follow those of the long variant
    logit_rows        [R] i64 tokens whose logits are wanted, those of drafts last
    sampled_rows      [R] i32 batch slots of theirs
    sample_positions  [R] i64 of the tokens that will be sampled
    num_drafts        how many of R are drafts
    trees             None: there are none, or all are chains
    states            rows of recurrent states, as in DeviceStateRows, on the host; None: the model has none
    adapters          [T] i32 the number of each token's LoRA adapter, -1: none; None: no token has one
    window_slots      slots in the window group; None: there is none, or they are -1 as `slots` are
    homes             [S] i64, the home rank of each sequence, see homes.py; None: they have none
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
    num_drafts: int = 0
    trees: TreePlaces | None = None
    states: tuple[list[int], list[int], list[int]] | None = None
    adapters: NDArray[np.int32] | None = None
    window_slots: NDArray[np.int64] | None = None
    homes: NDArray[np.int64] | None = None

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one token, and gets a next one."""
        return len(self.given_ids) == len(self.counts) == len(self.logit_rows)


def host_step(
    tokens: StepTokens,
    tables: NDArray[np.int64],
    block_size: int,
    num_long_rope_rows: int = 0,
    states: StateRows | None = None,
    adapters: NDArray[np.int32] | None = None,
    has_windows: bool = False,
) -> HostStep:
    """Return the arrays of a step.

    tables              [N, max_blocks], the block tables of all batch slots
    has_windows         the second half of a table is that of the window group
    num_long_rope_rows  rows of the rope table before those of the short variant
    adapters            see HostStep
    """
    starts, ends = np.array(tokens.starts), np.array(tokens.ends)
    counts = np.diff(starts)
    rows = np.array(tokens.batch_slots, dtype=np.int32)
    given_ids = np.array(tokens.token_ids, dtype=np.int64)  # UNKNOWN is -1
    if len(given_ids) == len(rows):
        token_rows, positions = rows, ends - 1
    else:
        token_rows, positions = np.repeat(rows, counts), run_places(starts, ends)
    places, offsets = np.divmod(positions, block_size)
    slots = tables[token_rows, places] * block_size + offsets
    window_slots = tables[token_rows, tables.shape[1] // 2 + places] * block_size + offsets if has_windows else None
    if tokens.trees is not None:
        positions = tokens.trees.positions  # slots follow each other whatever these are
    logit_rows = np.array(tokens.logit_rows, dtype=np.int64)
    sample_positions = positions[logit_rows] + 1
    short = short_rope_tokens(tokens.starts, tokens.short_ropes)
    if short is not None:
        positions = positions + short * num_long_rope_rows
    return HostStep(
        tuple(counts.tolist()),
        rows,
        ends.astype(np.int32),
        given_ids,
        positions,
        slots,
        logit_rows,
        token_rows[logit_rows],
        sample_positions,
        len(logit_rows) - tokens.num_ready,
        tokens.trees,
        None if states is None else place_saves(states, tokens.starts),
        adapters,
        window_slots,
    )


def fill(arrays: Mapping[str, NDArray[np.generic]], step: HostStep, padding_row: int) -> None:
    """Write the tokens of a step into the arrays of its fields' names, and token_rows [T] and query_starts [S + 1].

    The arrays may be longer. The further sequences are of batch slot padding_row and empty, except the last one: it has the
    further tokens, which see and store nothing. So do trees, where there are arrays for them.
    """
    num_tokens, counts, starts = len(step.given_ids), np.array(step.counts, np.int64), arrays["query_starts"]
    _write(arrays["rows"], step.rows, padding_row)
    _write(arrays["token_rows"], np.repeat(step.rows, counts), padding_row)
    starts[0] = 0
    starts[1 : len(counts) + 1] = np.cumsum(counts)
    starts[len(counts) + 1 :] = num_tokens
    starts[-1] = len(arrays["given_ids"])
    _fill_adapters(arrays, step)
    _fill_tokens(arrays, step)
    if "ancestors" in arrays:
        trees = _NO_TREES if step.trees is None else step.trees
        _write(arrays["num_drafts"], trees.num_drafts, 0)
        _write(arrays["ancestors"], trees.ancestors.view(np.int64), 0)
        _write(arrays["tree_positions"], trees.positions, 0)


def fill_sampled(arrays: Mapping[str, NDArray[np.generic]], step: HostStep) -> None:
    """Write which tokens of a step get a next one into the arrays of its fields' names."""
    for name in ("logit_rows", "sampled_rows", "sample_positions"):
        arrays[name][:] = getattr(step, name)


def fill_decode_slots(arrays: Mapping[str, NDArray[np.generic]], step: HostStep, padding_row: int) -> None:
    """Write what depends only on which sequences are in a decode step.

    The arrays may be longer: sequences of the batch slot padding_row, which see and store nothing, are added.
    """
    count, num_rows = len(step.counts), len(arrays["rows"])
    if count > num_rows or len(step.given_ids) != count:
        raise InvariantError(f"{count} sequences of a step cannot be padded to {num_rows}")
    for name, rows in (("rows", step.rows), ("token_rows", step.rows), ("sampled_rows", step.sampled_rows)):
        _write(arrays[name], rows, padding_row)
    _fill_adapters(arrays, step)
    arrays["query_starts"][:] = np.arange(num_rows + 1)
    arrays["logit_rows"][:] = np.arange(len(arrays["logit_rows"]))


def fill_places(arrays: Mapping[str, NDArray[np.generic]], step: HostStep) -> None:
    """Write what of a decode step changes with every token."""
    _fill_tokens(arrays, step)
    _write(arrays["sample_positions"], step.sample_positions, 0)


def _fill_adapters(arrays: Mapping[str, NDArray[np.generic]], step: HostStep) -> None:
    if step.adapters is not None:
        _write(arrays["adapters"], step.adapters, NO_ADAPTER)


def _fill_tokens(arrays: Mapping[str, NDArray[np.generic]], step: HostStep) -> None:
    _write(arrays["given_ids"], step.given_ids, 0)
    _write(arrays["positions"], step.positions, 0)
    _write(arrays["slots"], step.slots, -1)
    if "window_slots" in arrays:
        _write(arrays["window_slots"], step.slots if step.window_slots is None else step.window_slots, -1)
    _write(arrays["context_lens"], step.context_lens, 0)
    if "state_sources" in arrays:
        for name, rows in zip(STATE_ARRAYS, step.states or ((), (), ()), strict=True):
            _write(arrays[name], np.array(rows, np.int32), -1)


def _write(array: NDArray[np.generic], values: NDArray[np.generic], padding: int) -> None:
    count = len(values)
    array[:count] = values
    if count < len(array):
        array[count:] = padding


def empty_step() -> HostStep:
    """Return a step without tokens."""
    none, none_of_rows = np.zeros(0, np.int64), np.zeros(0, np.int32)
    return HostStep((), none_of_rows, none_of_rows, none, none, none, none, none_of_rows, none)


def with_adapters(step: HostStep, has_adapters: bool) -> HostStep:
    """Return a step of padding whose tokens have the first LoRA adapter, if has_adapters."""
    return replace(step, adapters=np.zeros(len(step.given_ids), np.int32)) if has_adapters else step


def full_step(
    num_tokens: int, num_sequences: int, context_len: int, padding_row: int, num_short: int = 1, num_drafts: int = 0
) -> HostStep:
    """Return a step of padding that takes as much memory as the largest one of real sequences, none longer than context_len.

    It has num_tokens tokens, or as many as num_sequences of that length have. The first sequences are long, as few as possible;
    the others have num_short tokens, if there are enough, else at least one. All get a next token. It stores nothing, and reads
    the padding row's blocks. Memory depends on the longest context, so only the last sequence has one of context_len, to keep
    the step short. Of the tokens that are not the last ones num_drafts are drafts, or all.
    """
    num_sequences = min(num_sequences, num_tokens)
    num_tokens = min(num_tokens, num_sequences * context_len)
    most = max(1, min(num_short, context_len, (num_tokens - 1) // max(1, num_sequences - 1)))
    counts = [num_tokens - most * (num_sequences - 1)] + [most] * (num_sequences - 1)
    for index in range(num_sequences - 1):
        # Block tables have no entries past context_len: what does not fit a sequence goes to the next one.
        further = max(0, counts[index] - context_len)
        counts[index] -= further
        counts[index + 1] += further
    rows = np.full(num_sequences, padding_row, np.int32)
    lengths = np.array(counts, np.int32)
    lengths[-1] = context_len
    ends = np.cumsum(counts) - 1
    drafts = np.setdiff1d(np.arange(num_tokens), ends)[:num_drafts]
    return HostStep(
        tuple(counts),
        rows,
        lengths,
        np.zeros(num_tokens, np.int64),
        np.zeros(num_tokens, np.int64),
        np.full(num_tokens, -1, np.int64),
        np.concatenate((ends, drafts)),
        np.full(num_sequences + len(drafts), padding_row, np.int32),
        np.zeros(num_sequences + len(drafts), np.int64),
        len(drafts),
    )
