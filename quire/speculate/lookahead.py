"""Lookahead proposer: guesses for the next tokens, which every step of the model improves (Fu et al., arXiv 2402.02057).

A window holds guesses for several positions, in levels. The first level is a chain after the last known token; below each of
its tokens are the guesses of successive steps. What the model predicts after the deepest level becomes the next level. The
n-gram of each column then goes to a pool, and n-grams of the pool that begin with the last known token are drafted. All of this
is one tree, so guesses that happen to be right are accepted too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.contracts.speculative import SpeculativeConfig
from quire.speculate.acceptance import WholeRecord
from quire.speculate.draft import ROOT, Draft, DraftBuilder, DraftedSequence
from quire.speculate.proposer import Outcome, Proposer

_MAX_FIRST_TOKENS = 4096
"""Maximum number of distinct first tokens of n-grams in the pool of a sequence."""


@dataclass(slots=True)
class _Memo:
    """Guesses for one sequence.

    levels  of the window, with a token per column; column i of level l is i + l + 1 positions after the last known token
    runs    first token -> the n-grams' other tokens, the latest first
    draft   the last one, until it is verified
    nodes   of that draft: the index of the deepest token of each column that it contains
    """

    levels: list[list[int]]
    runs: OrderedDict[int, list[tuple[int, ...]]] = field(default_factory=OrderedDict[int, list[tuple[int, ...]]])
    draft: Draft = field(default_factory=Draft)
    nodes: list[int] = field(default_factory=list[int])


class LookaheadProposer(Proposer):
    """Drafts a window of guesses, and n-grams that resulted from earlier ones."""

    record = WholeRecord
    wants_logits = True

    def __init__(self, config: SpeculativeConfig) -> None:
        self._width, self._num_guesses = config.lookahead_window, config.lookahead_guesses
        self._depth = config.lookahead_ngram - 1  # tokens of an n-gram after the first one, and levels of the window

    def num_available(self, sequence: DraftedSequence, limit: int) -> int:
        """See Proposer."""
        if sequence.memo is None:
            sequence.memo = self._begin(sequence.token_ids)
        memo: _Memo = sequence.memo
        num_runs = len(memo.runs.get(sequence.token_ids[-1], ()))
        return min(limit, (self._width + min(num_runs, self._num_guesses)) * self._depth)

    def _begin(self, token_ids: list[int]) -> _Memo:
        """Return a window of tokens of the sequence itself, and a pool of its n-grams."""
        count = len(token_ids)
        levels = [
            [token_ids[(7 * column + 13 * level) % count] for column in range(self._width)] for level in range(self._depth)
        ]
        memo = _Memo(levels)
        for start in range(max(0, count - 1 - _MAX_FIRST_TOKENS), count - self._depth):
            self._keep(memo, tuple(token_ids[start : start + self._depth + 1]))
        return memo

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """See Proposer."""
        return [self._draft(sequence, limit) for sequence, limit in wanted]

    def _draft(self, sequence: DraftedSequence, limit: int) -> Draft:
        """Return the tree, with fewer n-grams and columns if the limit is too low for all."""
        memo: _Memo = sequence.memo
        runs = memo.runs.get(sequence.token_ids[-1], ())
        width, num_runs = self._share(limit // self._depth, len(runs))
        tree = DraftBuilder()
        for run in runs[:num_runs]:
            node = ROOT
            for token_id in run:
                node = tree.add(node, token_id)
        memo.nodes = []
        below = ROOT
        for column in range(width):
            node = below = tree.add(below, memo.levels[0][column])
            for level in memo.levels[1:]:
                node = tree.add(node, level[column])
            memo.nodes.append(node)
        memo.draft = tree.build()
        return memo.draft

    def _share(self, room: int, num_known: int) -> tuple[int, int]:
        """Return the number of columns and of n-grams to draft, given room for so many in total.

        They share it in the configured proportion, with at least one column; columns use what n-grams do not need.
        """
        num_columns = max(1, round(room * self._width / (self._width + self._num_guesses)))
        num_runs = min(self._num_guesses, num_known, max(0, room - num_columns))
        return min(self._width, room - num_runs), num_runs

    def on_logits(self, outcomes: Sequence[Outcome]) -> None:
        """See Proposer: move the window forward by the accepted tokens, and keep the n-grams that it has produced."""
        for outcome in outcomes:
            memo: _Memo | None = outcome.sequence.memo
            if memo is None or not memo.nodes:
                continue
            nodes = dict(enumerate(memo.nodes)) if outcome.draft is memo.draft else _columns(memo, outcome.draft)
            memo.nodes = []
            if not nodes:
                continue
            # Row 0 is that of the last known token.
            rows = [outcome.rows[1 + node] for node in nodes.values()]
            new = dict(zip(nodes, outcome.step_logits[rows].argmax(dim=-1).tolist(), strict=True))
            for column, token_id in new.items():
                self._keep(memo, (*(level[column] for level in memo.levels), token_id))
            self._advance(memo, new, len(outcome.path), outcome.sequence.token_ids)

    def _advance(self, memo: _Memo, new: Mapping[int, int], num_accepted: int, token_ids: list[int]) -> None:
        """Drop the first level, append the model's new one, and shift columns by the number of accepted drafts.

        new  column -> token; a column that was not verified keeps its last one
        """
        levels = [*memo.levels[1:], [new.get(column, token_id) for column, token_id in enumerate(memo.levels[-1])]]
        for index, level in enumerate(levels):
            fresh = [token_ids[(11 * column + 5 * index) % len(token_ids)] for column in range(min(num_accepted, self._width))]
            levels[index] = level[num_accepted:] + fresh
        memo.levels = levels

    def _keep(self, memo: _Memo, run: tuple[int, ...]) -> None:
        """Put an n-gram into the pool, before the others with the same first token."""
        known = memo.runs.setdefault(run[0], [])
        if run[1:] in known:
            known.remove(run[1:])
        known.insert(0, run[1:])
        del known[self._num_guesses :]
        memo.runs.move_to_end(run[0])
        if len(memo.runs) > _MAX_FIRST_TOKENS:
            memo.runs.popitem(last=False)


def _columns(memo: _Memo, draft: Draft) -> dict[int, int]:
    """Return column -> index of its deepest token, for columns that a draft contains completely; it may have other tokens."""
    found: dict[int, int] = {}
    below: int | None = ROOT
    for column, token_id in enumerate(memo.levels[0]):
        below = draft.child(below, token_id)
        if below is None:
            break
        node: int | None = below
        for level in memo.levels[1:]:
            node = None if node is None else draft.child(node, level[column])
        if node is not None:
            found[column] = node
    return found
