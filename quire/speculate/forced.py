"""Tokens that a constraint forces: they are drafted, always match, and need no forward pass of their own."""

from __future__ import annotations

from collections.abc import Sequence

from quire.base.ids import SequenceId
from quire.sampling.row_state import SamplingRow
from quire.speculate.draft import ROOT, Draft, DraftBuilder

_MAX_FORCED = 32
"""Maximum number of forced tokens of a sequence in a step."""


class ForcedTokens:
    """The tokens that are forced next, per sequence."""

    def __init__(self) -> None:
        self._forced: dict[SequenceId, tuple[int, ...]] = {}

    def num_available(self, sequence_id: SequenceId, sampling: SamplingRow) -> int:
        """Find the tokens that are forced next, and return their number; call after a sequence got its tokens of a step."""
        forced = tuple(sampling.forced_tokens()[:_MAX_FORCED])
        if forced:
            self._forced[sequence_id] = forced
        else:
            self._forced.pop(sequence_id, None)
        return len(forced)

    def of(self, sequence_id: SequenceId) -> tuple[int, ...]:
        """Return the forced tokens that the last num_available found."""
        return self._forced.get(sequence_id, ())

    def forget(self, sequence_id: SequenceId) -> None:
        """Forget a sequence that ended or was preempted."""
        self._forced.pop(sequence_id, None)

    def clear(self) -> None:
        """Forget all sequences."""
        self._forced.clear()


def fit_draft(sampling: SamplingRow, draft: Draft, forced: Sequence[int], limit: int) -> Draft:
    """Return a draft that begins with the forced tokens, and continues with the proposer's tokens that fit the constraint.

    The part of a tree after the forced tokens is not checked: tokens that the constraint rejects are never accepted.
    """
    if sampling.matcher is None:
        return draft
    if not draft.is_chain:
        return _fit_tree(draft, forced, limit) if forced else draft
    num_shared = min(len(forced), len(draft))
    if len(draft) > 0 and draft.tokens[:num_shared] == tuple(forced[:num_shared]):
        num_fitting = sampling.num_fitting(draft.tokens)
        if num_fitting >= min(len(forced), limit):
            return draft if num_fitting == len(draft) else Draft.chain(draft.tokens[:num_fitting])
    elif not forced:
        return Draft()
    return Draft.chain(tuple(forced[:limit]))


def count_shared(draft: Draft, forced: Sequence[int]) -> int:
    """Return how many forced tokens a draft begins with, as a chain without branches."""
    count = 0
    for token_id, parent, expected in zip(draft.tokens, draft.parents, forced, strict=False):
        if token_id != expected or parent != count - 1:
            break
        count += 1
    return count


def _fit_tree(draft: Draft, forced: Sequence[int], limit: int) -> Draft:
    whole = DraftBuilder()
    node = ROOT
    for token_id in forced[:limit]:
        node = whole.add(node, token_id)
    places: dict[int, int] = {ROOT: ROOT}
    for index, depth in enumerate(draft.depths()):
        parent, token_id = draft.parents[index], draft.tokens[index]
        if parent in places and len(whole) < limit and (depth > len(forced) or token_id == forced[depth - 1]):
            places[index] = whole.add(places[parent], token_id)
    return whole.build()
