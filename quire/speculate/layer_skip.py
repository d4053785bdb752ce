"""Self-speculation: the model drafts for itself without some of its layers (Zhang et al., arXiv 2309.08168).

It reads the keys and values that the whole model has left, and writes those of its drafts where the step will write the right
ones: every slot that it touches is written again in the same step, in all layers, before anybody reads it. It keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.base.errors import ConfigError
from quire.kernels.reference.attention import AttentionInput
from quire.kv.pool import KvPool
from quire.model.build import Model
from quire.sampling.drafting import draw_drafts
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.proposer import Proposer


@dataclass(frozen=True, slots=True)
class Target:
    """The model that verifies, and its cache."""

    model: Model
    kv: KvPool


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
        going = [index for index, (_, limit) in enumerate(wanted) if limit > 0]
        while going:
            sequences = [wanted[index][0] for index in going]
            last = [drafts[index][-1] if drafts[index] else wanted[index][0].token_ids[-1] for index in going]
            positions = [len(wanted[index][0].token_ids) - 1 + len(drafts[index]) for index in going]
            logits = self._forward(sequences, last, positions)
            rows = [sequence.sampling for sequence in sequences]
            for index, token_id in zip(going, draw_drafts(logits, rows, [p + 1 for p in positions]), strict=True):
                drafts[index].append(token_id)
            going = [index for index in going if len(drafts[index]) < wanted[index][1]]
        return [Draft.chain(tuple(tokens)) for tokens in drafts]

    def _forward(self, sequences: Sequence[DraftedSequence], token_ids: list[int], positions: list[int]) -> torch.Tensor:
        """Compute one token of each sequence; return the logits behind it."""
        size = self._target.kv.spec.block_size
        num_blocks = max(positions) // size + 1
        tables = np.stack([sequence.table[:num_blocks] for sequence in sequences])
        slots = [int(table[p // size]) * size + p % size for table, p in zip(tables, positions, strict=True)]
        starts, lengths = list(range(len(positions) + 1)), [position + 1 for position in positions]
        attention = AttentionInput(torch.tensor(slots), starts, lengths, torch.from_numpy(tables))
        ids, places = torch.tensor(token_ids), torch.tensor(positions)
        rows = list(range(len(positions)))
        return self._target.model.step(ids, places, attention, self._target.kv, rows, layers=self._layers)
