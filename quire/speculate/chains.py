"""Draft chains with a model, one token per pass, all sequences together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from quire.model.native_decoder import NativeDecoder
from quire.model.native_steps import OneTokenSteps
from quire.model.token_runs import TokenRuns, address_of
from quire.sampling.drafting import DraftDraws
from quire.speculate.draft import DraftedSequence
from quire.speculate.target import Target

Chain = tuple[DraftedSequence, list[int], int]
"""A sequence, its drafts so far, and the number of drafts that it is to have."""


def extend_chains(
    target: Target,
    chains: Sequence[Chain],
    layers: Sequence[int] | None = None,
    note_fed: Callable[[DraftedSequence, int | None], None] | None = None,
) -> None:
    """Append drafts to each chain until it has the requested number; the KV of the last one is not stored.

    target    the drafting model and its cache, which holds all known tokens and drafts but the last
    layers    layers to run of the sequences' own model, in order; None: all layers of another model
    note_fed  called for every token whose KV was written: with the draft, or None for the last known token
    """
    going = [chain for chain in chains if len(chain[1]) < chain[2]]
    while going:
        num_steps = min(count - len(tokens) for _, tokens, count in going)
        sequences = [sequence for sequence, _, _ in going]
        firsts = [len(sequence.token_ids) - 1 + len(tokens) for sequence, tokens, _ in going]
        run = _stepper(target, sequences, firsts, num_steps, layers)
        draws = DraftDraws([sequence.sampling for sequence in sequences], [first + 1 for first in firsts])
        for _ in range(num_steps):
            found = draws.draw(run([tokens[-1] if tokens else sequence.token_ids[-1] for sequence, tokens, _ in going]))
            for (sequence, tokens, _), token_id in zip(going, found, strict=True):
                if note_fed is not None:
                    note_fed(sequence, tokens[-1] if tokens else None)
                tokens.append(token_id)
        going = [chain for chain in going if len(chain[1]) < chain[2]]


def _stepper(
    target: Target, sequences: list[DraftedSequence], firsts: list[int], num_steps: int, layers: Sequence[int] | None
) -> Callable[[Sequence[int]], Tensor]:
    """Return a function that computes one token of each sequence, from the positions `firsts` on, and returns the logits."""
    model, kv = target.model, target.kv
    short_ropes = [sequence.uses_short_rope for sequence in sequences] if layers is not None else None
    if isinstance(model, NativeDecoder):
        tables = np.stack([sequence.table for sequence in sequences])
        return OneTokenSteps(model, kv, firsts, tables, num_steps, layers, short_ropes).run
    addresses = [address_of(sequence.table) for sequence in sequences]
    offsets = itertools.count(1)

    def run(token_ids: Sequence[int]) -> Tensor:
        ahead = next(offsets)
        ends, rows = [first + ahead for first in firsts], list(range(len(firsts)))
        tables = [sequence.table for sequence in sequences]
        runs = TokenRuns(list(token_ids), [*rows, len(rows)], ends, tables, addresses, None, short_ropes)
        return model.step(*runs.tensors(kv.spec.block_size), kv, rows, layers=layers)

    return run
