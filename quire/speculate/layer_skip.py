"""Self-speculation: the model drafts for itself without some of its layers (Zhang et al., arXiv 2309.08168).

It reads the keys and values that the whole model has left, and writes those of its drafts where the step will write the right
ones: every slot that it touches is written again in the same step, in all layers, before anybody reads it. It keeps nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.base.errors import ConfigError
from quire.kernels.reference.attention import AttentionInput
from quire.model.native_decoder import NativeDecoder
from quire.model.native_steps import OneTokenSteps
from quire.sampling.drafting import DraftDraws
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.proposer import Proposer
from quire.speculate.target import Target


def kept_layers(num_layers: int, skipped: Sequence[int]) -> tuple[int, ...]:
    """Return the layers that are left. Raises ConfigError where there are not so many, or none is left."""
    beyond = [layer for layer in skipped if layer >= num_layers]
    if beyond:
        raise ConfigError(f"skipped_layers names layer {beyond[0]}, but the model has layers 0 to {num_layers - 1}")
    kept = tuple(layer for layer in range(num_layers) if layer not in skipped)
    if not kept:
        raise ConfigError(f"skipped_layers names all {num_layers} layers of the model; leave it at least one")
    return kept


class LayerSkipProposer(Proposer):
    """Drafts by some layers of the model, a token a pass, all sequences together.

    skipped  the layers that it leaves out. Raises ConfigError
    """

    def __init__(self, target: Target, skipped: Sequence[int]) -> None:
        self._target = target
        self._layers = kept_layers(len(target.model.spec.layers), skipped)

    def look(self, sequence: DraftedSequence, limit: int) -> int:
        """See Proposer; something can always be drafted."""
        return limit

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """See Proposer."""
        drafts: list[list[int]] = [[] for _ in wanted]
        going = list(range(len(wanted)))
        while going := [index for index in going if len(drafts[index]) < wanted[index][1]]:
            num_steps = min(wanted[index][1] - len(drafts[index]) for index in going)
            self._draft_on([(wanted[index][0], drafts[index]) for index in going], num_steps)
        return [Draft.chain(tuple(tokens)) for tokens in drafts]

    def _draft_on(self, rows: list[tuple[DraftedSequence, list[int]]], num_steps: int) -> None:
        """Draft num_steps more tokens behind those of each row."""
        sequences = [sequence for sequence, _ in rows]
        firsts = [len(sequence.token_ids) - 1 + len(tokens) for sequence, tokens in rows]
        run = self._stepper(sequences, firsts, num_steps)
        draws = DraftDraws([sequence.sampling for sequence in sequences], [first + 1 for first in firsts])
        for _ in range(num_steps):
            last = [tokens[-1] if tokens else sequence.token_ids[-1] for sequence, tokens in rows]
            for (_, tokens), token_id in zip(rows, draws.draw(run(last)), strict=True):
                tokens.append(token_id)

    def _stepper(
        self, sequences: list[DraftedSequence], firsts: list[int], num_steps: int
    ) -> Callable[[Sequence[int]], torch.Tensor]:
        """Return what computes a token of each sequence, from the positions `firsts` on, and returns the logits behind them."""
        model, kv = self._target.model, self._target.kv
        tables = np.stack([sequence.table for sequence in sequences])
        if isinstance(model, NativeDecoder):
            return OneTokenSteps(model, kv, firsts, tables, num_steps, self._layers).run
        offsets = itertools.count()
        size = kv.spec.block_size

        def run(token_ids: Sequence[int]) -> torch.Tensor:
            positions = np.array(firsts) + next(offsets)
            blocks, places = np.divmod(positions, size)
            slots = tables[np.arange(len(firsts)), blocks] * size + places
            starts, lengths = list(range(len(firsts) + 1)), (positions + 1).tolist()
            known = torch.from_numpy(tables[:, : int(blocks.max()) + 1])
            attention = AttentionInput(torch.from_numpy(slots), starts, lengths, known)
            ids, rows = torch.tensor(token_ids), list(range(len(firsts)))
            return model.step(ids, torch.from_numpy(positions), attention, kv, rows, layers=self._layers)

        return run
