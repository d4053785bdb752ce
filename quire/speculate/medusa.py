"""Medusa proposer: output heads on the model's last hidden state each draft one token (Cai et al., arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.base.errors import UnsupportedError
from quire.model.heads.head_spec import ParallelHead
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.proposer import Proposer


@dataclass(frozen=True, slots=True)
class _Memo:
    """The hidden state [H] behind the last token that the model has read, which is at `place`."""

    place: int
    hidden: Tensor


class MedusaProposer(Proposer):
    """Drafts the most likely token of every head, as a chain."""

    tap_layers: tuple[int, ...] | None = ()

    def __init__(self, head: ParallelHead) -> None:
        depth = max(map(len, head.blocks))
        if any(len(block) != depth for block in head.blocks):
            raise UnsupportedError("Medusa heads with different numbers of layers are not supported")
        self._num_heads, self._hidden_size = len(head.heads), head.heads[0].shape[1]
        self._layers: list[tuple[Tensor, Tensor | None]] = []
        for index in range(depth):
            biases = [block[index][1] for block in head.blocks]
            bias = None if any(b is None for b in biases) else torch.stack([b for b in biases if b is not None])[:, None]
            self._layers.append((torch.stack([block[index][0] for block in head.blocks]).transpose(1, 2), bias))
        self._heads = head.heads
        self._vocabulary = None if head.vocabulary is None else head.vocabulary.long()

    def feed(self, sequence: DraftedSequence, first: int, features: Tensor) -> None:
        """See Proposer."""
        sequence.memo = _Memo(first + len(features) - 1, features[-1])

    def look(self, sequence: DraftedSequence, limit: int) -> int:
        """See Proposer."""
        memo: _Memo | None = sequence.memo
        is_fresh = memo is not None and memo.place == len(sequence.token_ids) - 2
        return min(limit, self._num_heads) if is_fresh else 0

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """See Proposer."""
        count = max(count for _, count in wanted)
        hidden = torch.stack([sequence.memo.hidden for sequence, _ in wanted]).to(self._heads[0].dtype)
        x = hidden.expand(count, -1, -1)
        for weight, bias in self._layers:
            y = torch.bmm(x, weight[:count])
            x = x + F.silu(y if bias is None else y + bias[:count])
        best = torch.stack([F.linear(x[index], self._heads[index]).argmax(-1) for index in range(count)])
        tokens = (best if self._vocabulary is None else self._vocabulary[best]).T.tolist()
        return [Draft.chain(tuple(line[:limit])) for line, (_, limit) in zip(tokens, wanted, strict=True)]
