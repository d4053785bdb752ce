"""HeadTrees: a head drafts a tree that grows where it is most probable (EAGLE-2, Li et al., arXiv 2406.16858).

The most probable tokens of a level, by the probability of the whole path, are computed in one pass, each attending to its own
ancestors; their outputs are the candidates of the next level. The draft consists of the most probable of all candidates. Their
keys and values are stored after the known positions, where the sequence has room for its drafts anyway, and are never read
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.kernels.reference.attention import AttentionMetadata, TreeInput
from quire.kernels.reference.noise import gumbel_noise_at
from quire.model.heads.build import HeadModel
from quire.speculate.chain_drafter import BlockCache, HeadDrafter
from quire.speculate.draft import ROOT, Draft, DraftedSequence, best_draft
from quire.speculate.head_pass import HeadPass, index_tensor

_NOISY_TOKENS = 256
"""Number of candidate tokens per row for sampled requests."""
_NEVER = -1e9


@dataclass(slots=True)
class _Tree:
    """The tree of a sequence while it grows.

    start      index of the first position after the known ones in the pass's block table
    position   of that index
    count      tokens of the draft; also the maximum number of computed tokens, as there is room for so many
    tokens, parents, values
               of all candidates so far, by level: the parent's index and the log probability of the path to it
    level      candidates of the last level
    ancestors  computed token -> bit mask of its computed ancestors, itself included
    """

    start: int
    position: int
    count: int
    num_levels: int
    width: int
    tokens: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])
    values: list[float] = field(default_factory=list[float])
    level: list[int] = field(default_factory=list[int])
    ancestors: dict[int, int] = field(default_factory=lambda: {ROOT: 0})

    @property
    def num_computed(self) -> int:
        return len(self.ancestors) - 1

    def branch(self, parent: int, token_ids: list[int], values: list[float]) -> None:
        """Append candidates after a token, in descending order; none gets a higher value than the parent."""
        before = 0.0 if parent == ROOT else self.values[parent]
        for token_id, value in zip(token_ids, values, strict=True):
            self.level.append(len(self.tokens))
            self.tokens.append(token_id)
            self.parents.append(parent)
            self.values.append(before + min(value, 0.0))

    def take_level(self) -> list[int]:
        """Return the tokens of the last level that are to be computed, and begin the next level."""
        chosen = sorted(self.level, key=lambda node: -self.values[node])[: self.width]
        for node in chosen:
            self.ancestors[node] = self.ancestors[self.parents[node]] | 1 << self.num_computed
        self.level = []
        return chosen


def rank_logits(logits: Tensor, count: int = _NOISY_TOKENS) -> tuple[Tensor, torch.return_types.topk]:
    """Return logits [R, V] in f32 without NaN, and the `count` highest of each row, or all."""
    wide = torch.nan_to_num(logits.float(), nan=_NEVER)
    return wide, wide.topk(min(count, wide.shape[1]))


class HeadTrees:
    """Drafts trees with a head, one level per pass, all sequences together.

    vocabulary  [V'] i64 the target's token for each token of the head; None: identical
    top_k       tokens that are tried after each, and the maximum that is computed per level
    depth       maximum number of levels
    """

    def __init__(
        self, model: HeadModel | HeadDrafter, kv: BlockCache, vocabulary: Tensor | None, top_k: int, depth: int
    ) -> None:
        self._model, self._kv, self._vocabulary = model, kv, vocabulary
        self._top_k, self._depth = top_k, depth

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a tree."""
        return self._top_k + (self._depth - 1) * self._top_k * self._top_k

    def draft(self, sequences: Sequence[DraftedSequence], counts: Sequence[int], first: HeadPass) -> list[Draft]:
        """Return a tree for each sequence, of at most counts[s] tokens, after the positions that the pass computes."""
        trees = [
            self._plant(length, len(sequence.token_ids) - 1, count)
            for sequence, length, count in zip(sequences, first.attention.context_lens, counts, strict=True)
        ]
        rows = [(index, ROOT) for index in range(len(trees))]
        last = [start - 1 for start in first.attention.query_starts[1:]]
        step, level = first, 1
        while True:
            logits = self._model.enter(step.token_ids, step.positions, step.attention, self._kv, step.features, last)
            positions = [trees[index].position + level for index, _ in rows]
            token_ids, values = self._likeliest(logits, [sequences[index] for index, _ in rows], positions)
            for (index, parent), best, shares in zip(rows, token_ids, values, strict=True):
                trees[index].branch(parent, best, shares)
            above = {row: place for place, row in enumerate(rows)}
            rows = [(index, node) for index, tree in enumerate(trees) if level < tree.num_levels for node in tree.take_level()]
            if not rows:
                return [best_draft(tree.tokens, tree.parents, tree.values, tree.count) for tree in trees]
            parents = [above[index, trees[index].parents[node]] for index, node in rows]
            features = self._model.recycled(len(above))[parents].contiguous()
            step = self._pass(trees, rows, level, first.attention.block_tables, features)
            last = list(range(len(rows)))
            level += 1

    def _plant(self, start: int, position: int, count: int) -> _Tree:
        num_levels = min(self._depth, count)
        return _Tree(start, position, count, num_levels, min(self._top_k, max(1, count // max(1, num_levels - 1))))

    def _likeliest(
        self, logits: Tensor, sequences: list[DraftedSequence], positions: list[int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return the tokens that are tried after each row of logits [R, V'], and their log probabilities.

        For a sampled request these are the winners with the noise that the verifier will use at their positions.
        """
        count = min(self._top_k, logits.shape[1])
        rows = [sequence.sampling for sequence in sequences]
        if all(row.is_greedy for row in rows):
            wide, best = rank_logits(logits, count)
            ids, values = self._widen(best.indices), (best.values - wide.logsumexp(-1, keepdim=True)).cpu()
        else:
            _, some = rank_logits(logits, max(_NOISY_TOKENS, count))
            ids, found = self._widen(some.indices.cpu()), some.values.cpu()
            noise = gumbel_noise_at([row.seed for row in rows], positions, ids)
            factors = torch.tensor([[1.0 if row.is_greedy else row.inverse_temperature] for row in rows])
            scores = found * factors + noise * torch.tensor([[not row.is_greedy] for row in rows])
            best = scores.topk(count)
            ids, values = ids.gather(1, best.indices), best.values - scores.logsumexp(-1, keepdim=True)
        return ids.tolist(), torch.nan_to_num(values, nan=_NEVER, neginf=_NEVER).tolist()

    def _widen(self, indices: Tensor) -> Tensor:
        return indices if self._vocabulary is None else self._vocabulary[indices]

    def _pass(self, trees: list[_Tree], rows: list[tuple[int, int]], level: int, tables: Tensor, features: Tensor) -> HeadPass:
        """Return the pass for `rows`, pairs (tree, token) in order of the trees; they are the last computed ones of each."""
        size = self._kv.spec.block_size
        row_counts = Counter(index for index, _ in rows)
        going = sorted(row_counts)
        starts, lengths, slots = [0], [], []
        for index in going:
            tree = trees[index]
            lengths.append(tree.start + tree.num_computed)
            num_rows = row_counts[index]
            starts.append(starts[-1] + num_rows)
            for place in range(lengths[-1] - num_rows, lengths[-1]):
                slots.append(int(tables[index, place // size]) * size + place % size)
        num_drafts = torch.tensor([trees[index].num_computed for index in going], dtype=torch.int32)
        ancestors = np.array([trees[index].ancestors[node] for index, node in rows], dtype=np.uint64)
        attention = AttentionMetadata(
            index_tensor(slots),
            starts,
            lengths,
            tables[torch.tensor(going)],
            TreeInput(num_drafts, torch.from_numpy(ancestors.view(np.int64))),
        )
        token_ids = index_tensor([trees[index].tokens[node] for index, node in rows])
        positions = index_tensor([trees[index].position + level - 1 for index, _ in rows])
        return HeadPass(token_ids, positions, attention, features)
