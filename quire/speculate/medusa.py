"""Medusa proposer: output heads on the model's last hidden state each draft one token (Cai et al., arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import torch
from torch import Tensor

from quire.model.heads.parallel_model import ParallelModel
from quire.speculate.draft import ROOT, Draft, DraftedSequence
from quire.speculate.proposer import Proposer
from quire.speculate.records import TreeRecord


@dataclass(frozen=True, slots=True)
class _Memo:
    """The hidden state [H] behind the last token that the model has read, which is at `place`."""

    place: int
    hidden: Tensor


class MedusaProposer(Proposer):
    """Drafts the most likely token of every head, as a chain, or of the most likely ones of all the likeliest tree.

    vocabulary  [V'] the model's token of each that the heads say; None: the same
    top_k       tokens of a head that are tried behind each of the head before; 1: a chain
    """

    tap_layers: tuple[int, ...] | None = ()

    def __init__(self, model: ParallelModel, vocabulary: Tensor | None, top_k: int = 1) -> None:
        if top_k > 1:
            self.record = TreeRecord
        self._model = model
        self._top_k = min(top_k, model.vocab_size)
        self._vocabulary = None if vocabulary is None else vocabulary.long()

    def feed(self, sequence: DraftedSequence, first: int, features: Tensor) -> None:
        """See Proposer."""
        sequence.memo = _Memo(first + len(features) - 1, features[-1])

    def look(self, sequence: DraftedSequence, limit: int) -> int:
        """See Proposer."""
        memo: _Memo | None = sequence.memo
        is_fresh = memo is not None and memo.place == len(sequence.token_ids) - 2
        return min(limit, sum(self._top_k ** (1 + index) for index in range(self._model.num_heads))) if is_fresh else 0

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """See Proposer."""
        count = min(self._model.num_heads, max(count for _, count in wanted))
        said = self._model.speak(torch.stack([sequence.memo.hidden for sequence, _ in wanted]), count)
        if self._top_k > 1:
            return self._grow(said, [limit for _, limit in wanted])
        best = torch.stack([logits.argmax(-1) for logits in said])
        tokens = (best if self._vocabulary is None else self._vocabulary[best]).T.tolist()
        return [Draft.chain(tuple(line[:limit])) for line, (_, limit) in zip(tokens, wanted, strict=True)]

    def _grow(self, said: list[Tensor], limits: list[int]) -> list[Draft]:
        """Return for each sequence the likeliest tree, the likeliest tokens first, from the logits [S, V'] of every head."""
        shares: list[list[list[float]]] = []
        tokens: list[list[list[int]]] = []
        for logits in said:
            found = logits.softmax(-1).topk(self._top_k)
            ids = found.indices if self._vocabulary is None else self._vocabulary[found.indices]
            shares.append(found.values.tolist())
            tokens.append(ids.tolist())
        return [
            likeliest_tree([head[row] for head in tokens], [head[row] for head in shares], limit)
            for row, limit in enumerate(limits)
        ]


def likeliest_tree(tokens: Sequence[Sequence[int]], shares: Sequence[Sequence[float]], limit: int) -> Draft:
    """Return the `limit` likeliest of all paths through the levels, the likeliest first.

    tokens, shares  per level its tokens, the likeliest first, and their probabilities, as if no level knew of another
    """
    ids: list[int] = []
    parents: list[int] = []
    waiting = [(-shares[0][0], 0, 0, ROOT, 1.0)]  # (-probability, level, rank, parent, the parent's probability)
    while waiting and len(ids) < limit:
        share, level, rank, parent, before = heappop(waiting)
        ids.append(tokens[level][rank])
        parents.append(parent)
        if rank + 1 < len(tokens[level]):
            heappush(waiting, (-before * shares[level][rank + 1], level, rank + 1, parent, before))
        if level + 1 < len(tokens):
            heappush(waiting, (share * shares[level + 1][0], level + 1, 0, len(ids) - 1, -share))
    return Draft(tuple(ids), tuple(parents))
