"""Prompts divided among GPU ranks that each have the whole model and the whole KV cache (prefill context parallelism).

A rank computes its pieces of the runs of prompts. Rows depend on each other through the cache only, so each layer exchanges the
stored keys and values of the step's tokens, and at the end the ranks gather the hidden states. Steps without long runs, such as
decode steps, are computed by every rank whole: they read the same weights for one row or for all, and exchange nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.contracts.parallel import LEAST_DIVIDED_TOKENS
from quire.kernels.triton.step import DeviceAttentionMetadata, send_together
from quire.model.device_collectives import Collectives

_PIECES = 2
"""Of a run, for each rank: one near its start and one near its end, so that all attend to about as many keys."""


class Piece(NamedTuple):
    """Tokens [first, last) of a sequence's tokens in a step."""

    sequence: int
    first: int
    last: int


class DividedStep(NamedTuple):
    """What a rank computes of a step.

    rows   [N] i64: its tokens; step: the same with each piece as a sequence
    sizes  tokens of each rank; order [T] i64: where each token of the step is among those of all ranks one after the other
    """

    rows: Tensor
    step: DeviceAttentionMetadata
    sizes: tuple[int, ...]
    order: Tensor


def divide_runs(counts: Sequence[int], size: int) -> list[list[Piece]] | None:
    """Return the pieces of each of `size` ranks of runs with these numbers of tokens; None: no run is long enough.

    Long runs are cut into two pieces for each rank; others go to the rank that has the fewest tokens then.
    """
    least = max(LEAST_DIVIDED_TOKENS, 2 * _PIECES * size)
    if all(count < least for count in counts):
        return None
    found: list[list[Piece]] = [[] for _ in range(size)]
    loads = [0] * size
    for sequence in sorted(range(len(counts)), key=lambda index: counts[index] < least):  # stable: long ones first
        count = counts[sequence]
        if count >= least:
            borders = [number * count // (_PIECES * size) for number in range(_PIECES * size + 1)]
            pieces = [Piece(sequence, *border) for border in itertools.pairwise(borders)]
            for rank in range(size):
                found[rank] += pieces[rank], pieces[-1 - rank]
        else:
            rank = min(range(size), key=loads.__getitem__)
            found[rank].append(Piece(sequence, 0, count))
        loads = [sum(piece.last - piece.first for piece in own) for own in found]
    return found


class RowRanks:
    """The ranks that divide the rows of prompts, as one of them sees them. All make the same calls in the same order.

    communicator  of these ranks, on the model's device
    rank          of this one among them
    """

    def __init__(self, communicator: Collectives, rank: int) -> None:
        self._communicator, self._rank = communicator, rank

    def divide(self, step: DeviceAttentionMetadata) -> DividedStep | None:
        """Return this rank's part of a step; None: every rank computes all of it."""
        counts, lengths = step.query_counts, step.host_context_lens
        if counts is None or lengths is None or step.num_drafts is not None:
            return None
        divided = divide_runs(counts, self._communicator.size)
        if divided is None:
            return None
        starts = np.cumsum((0, *counts))
        rows = [[np.arange(starts[piece.sequence] + piece.first, starts[piece.sequence] + piece.last) for piece in own]
                for own in divided]  # fmt: skip
        whole = np.concatenate([part for own in rows for part in own])
        own, pieces = np.concatenate(rows[self._rank]), divided[self._rank]
        own_counts = tuple(piece.last - piece.first for piece in pieces)
        own_lengths = tuple(lengths[piece.sequence] - counts[piece.sequence] + piece.last for piece in pieces)
        wide = [torch.from_numpy(each) for each in (own, whole, np.argsort(whole))]
        numbers = np.cumsum((0, *own_counts)), own_lengths, [piece.sequence for piece in pieces]
        sent = [*wide, *(torch.tensor(each, dtype=torch.int32) for each in numbers)]
        own_rows, all_rows, order, query_starts, context_lens, sequences = send_together(sent, step.slots.device)
        sizes = tuple(sum(len(part) for part in each) for each in rows)
        part = replace(
            step,
            slots=step.slots[own_rows],
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=step.block_tables.index_select(0, sequences),
            query_counts=own_counts,
            max_context_len=max(own_lengths),
            host_context_lens=own_lengths,
            plans={},
            exchange=_Exchange(self._communicator, step.slots[all_rows], sizes, self._rank),
            _tiles={},
        )
        return DividedStep(own_rows, part, sizes, order)

    def gather(self, hidden: Tensor, divided: DividedStep) -> Tensor:
        """Return the hidden states [T, N] of all tokens of a step, given those of this rank's."""
        found = hidden.new_empty(sum(divided.sizes), hidden.shape[1])
        self._communicator.all_gather(found, hidden.contiguous(), divided.sizes)
        return found.index_select(0, divided.order)


class _Exchange:
    """Stores the keys and values of all ranks' tokens, given the cache with this rank's.

    slots  [T] i64 of all tokens, rank by rank; sizes: of each rank
    """

    def __init__(self, communicator: Collectives, slots: Tensor, sizes: Sequence[int], rank: int) -> None:
        self._communicator, self._slots, self._sizes = communicator, slots, sizes
        self._own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    def __call__(self, cache: Sequence[Tensor | None]) -> None:
        done: list[Tensor] = []
        for part in cache:
            if part is None or any(part is other for other in done):  # keys may be values, too
                continue
            done.append(part)
            seen = part.view(torch.uint8) if part.itemsize == 1 else part  # not every operation knows float8
            blocks, offsets = self._slots // part.shape[2], self._slots % part.shape[2]
            own = seen[blocks[self._own], :, offsets[self._own]]
            found = own.new_empty(len(blocks), *own.shape[1:])
            self._communicator.all_gather(found, own, self._sizes)
            seen[blocks, :, offsets] = found
