"""Medusa proposer: output heads on the model's last hidden state each draft one token (Cai et al., arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from torch import Tensor

from quire.base.errors import ConfigError
from quire.contracts.medusa_choices import Choices
from quire.contracts.speculative import SpeculativeConfig
from quire.model.heads.head_spec import ParallelHead
from quire.model.heads.parallel_model import ParallelModel
from quire.speculate.acceptance import TreeRecord
from quire.speculate.draft import ROOT, Draft, DraftedSequence
from quire.speculate.features import FeatureRun, join
from quire.speculate.proposer import Proposer


@dataclass(frozen=True, slots=True)
class _Memo:
    """The hidden state of the last token that the model has processed, which is at `place`: one row."""

    place: int
    hidden: FeatureRun


class MedusaProposer(Proposer):
    """Drafts the most likely token of every head as a chain, or a tree: of given ranks, or of the most probable paths.

    vocabulary  [V'] the target's token for each token of the heads; None: identical
    top_k       tokens of a head that are tried after each token of the previous head; 1: a chain
    depth       maximum number of heads used
    choices     paths of the tree, the best first; None: a chain, or the most probable tree. Raises ConfigError
    """

    aux_hidden_state_layers: tuple[int, ...] | None = ()
    inputs_last_only = True

    def __init__(
        self,
        model: ParallelModel,
        vocabulary: Tensor | None,
        top_k: int = 1,
        depth: int = 64,
        choices: Choices | None = None,
    ) -> None:
        if top_k > 1 or choices is not None:
            self.record = TreeRecord
        self.choices = None if choices is None else tuple(path for path in choices if len(path) <= depth)
        if self.choices is not None:
            _check_choices(self.choices, model)
            index = {path: place for place, path in enumerate(self.choices)} | {(): ROOT}
            self._parents = tuple(index[path[:-1]] for path in self.choices)
            top_k = 1 + max(max(path) for path in self.choices)
        self._model = model
        self._num_heads = min(model.num_heads, depth)
        self._top_k = min(top_k, model.vocab_size)
        self._vocabulary = None if vocabulary is None else vocabulary.long()
        self._num_nodes = sum(self._top_k ** (1 + index) for index in range(self._num_heads))

    def on_hidden_states(self, fed: Sequence[tuple[DraftedSequence, int, int]], features: Tensor) -> None:
        """See Proposer."""
        row = 0
        for sequence, first, count in fed:
            row += count
            sequence.memo = _Memo(first + count - 1, FeatureRun(features, row - 1, 1))

    def num_available(self, sequence: DraftedSequence, limit: int) -> int:
        """See Proposer."""
        memo: _Memo | None = sequence.memo
        is_fresh = memo is not None and memo.place == len(sequence.token_ids) - 2
        if not is_fresh:
            return 0
        return min(limit, self._num_nodes if self.choices is None else len(self.choices))

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """See Proposer."""
        count = min(self._num_heads, max(count for _, count in wanted))
        hidden = join([sequence.memo.hidden for sequence, _ in wanted], may_go_on=True)
        if self._top_k > 1 or self.choices is not None:
            return self.grow(self._model.logits(hidden[: len(wanted)], count), [limit for _, limit in wanted])
        best = self._model.best(hidden, len(wanted), count)
        return [Draft.chain(tuple(line[:limit])) for line, (_, limit) in zip(best, wanted, strict=True)]

    def grow(self, logits: Tensor, limits: list[int]) -> list[Draft]:
        """Return the tree of each sequence, the configured or the most probable one, from the logits [heads, S, V']."""
        # A configured tree needs only ranks, which softmax does not change.
        found = (logits if self.choices is not None else logits.softmax(-1)).topk(self._top_k)
        tokens: list[list[list[int]]] = (
            found.indices if self._vocabulary is None else self._vocabulary[found.indices]
        ).tolist()
        if self.choices is not None:
            return [self._pick([head[row] for head in tokens], limit) for row, limit in enumerate(limits)]
        shares: list[list[list[float]]] = found.values.tolist()
        return [
            likeliest_tree([head[row] for head in tokens], [head[row] for head in shares], limit)
            for row, limit in enumerate(limits)
        ]

    def _pick(self, tokens: list[list[int]], limit: int) -> Draft:
        """Return the first paths of the configured tree; none of them needs a head that was not run."""
        paths = (self.choices or ())[:limit]
        return Draft(tuple(tokens[len(path) - 1][path[-1]] for path in paths), self._parents[: len(paths)])


def medusa_tree(config: SpeculativeConfig, head: ParallelHead) -> Choices | None:
    """Return the paths that are configured for a head's drafts; None: the most probable ones."""
    return config.medusa_choices or (head.choices if config.draft_top_k is None else None)


def _check_choices(choices: Choices, model: ParallelModel) -> None:
    deepest, widest = max(map(len, choices), default=0), max((max(path) for path in choices), default=0)
    if not choices or deepest > model.num_heads or widest >= model.vocab_size:
        raise ConfigError(
            f"medusa_choices must have paths of 1 to {model.num_heads} ranks (the number of heads), each rank below the heads' "
            f"vocabulary size of {model.vocab_size}; the longest path has {deepest}, and the highest rank is {widest}"
        )


def likeliest_tree(tokens: Sequence[Sequence[int]], shares: Sequence[Sequence[float]], limit: int) -> Draft:
    """Return the `limit` most probable paths through the levels, in descending order.

    tokens, shares  per level its tokens in descending order of probability, and their probabilities, which are assumed to be
                    independent between levels
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
