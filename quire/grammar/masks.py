"""MaskFill: the token masks of one output, and of the drafts after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from quire.base.logging import get_logger
from quire.contracts.constraint import GrammarMatcher
from quire.grammar.matcher import MaskedMatcher

logger = get_logger(__name__)

_FORGET = 0.5
"""Decay per step of the cost of an expensive mask in the estimate."""


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """Tokens that may follow; parents: index of each token's parent, -1 for those that would come next."""

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()


NO_DRAFT = DraftedTokens()


class MaskCost:
    """Estimated maximum cost of a mask of one output: CPU seconds, infinity if unknown."""

    __slots__ = ("mask_s",)

    def __init__(self, mask_s: float = math.inf) -> None:
        self.mask_s = mask_s

    def note(self, mask_s: float) -> None:
        """Record the cost of a mask."""
        self.mask_s = mask_s if math.isinf(self.mask_s) else max(mask_s, self.mask_s * _FORGET)


class MaskFill:
    """The masks of one output for one step. One thread fills them; no other may use the matcher until they are done.

    ending_ids  the tokens that are allowed where the output may end
    words       numpy [1 + drafted tokens, at least ceil(vocabulary / 32)] i32: a bit per token, the lowest first: the mask of
                the next token, then those after each drafted token
    error       why the matcher cannot continue; the masks are then undefined
    num_filled  number of masks that the matcher computed, excluding those of forced tokens
    num_forced  number of leading drafts that are the only possible tokens
    is_known    per row whether it is filled: not after a draft that the grammar rejects, after an end, or without time
    is_broken   whether the matcher could not be rolled back after the drafts, and must be recreated
    is_done     whether all of this is set; set last, by the filling thread
    is_begun    whether a thread has started to fill them
    is_slow     whether they are filled separately from others
    """

    __slots__ = (
        "cost",
        "draft",
        "ending_ids",
        "error",
        "is_begun",
        "is_broken",
        "is_done",
        "is_hurried",
        "is_known",
        "is_slow",
        "matcher",
        "num_filled",
        "num_forced",
        "words",
    )

    def __init__(
        self,
        matcher: GrammarMatcher,
        ending_ids: Sequence[int] = (),
        draft: DraftedTokens = NO_DRAFT,
        cost: MaskCost | None = None,
    ) -> None:
        self.matcher = cast("MaskedMatcher", matcher)
        self.ending_ids = ending_ids
        self.draft = draft
        self.cost = MaskCost(self.matcher.source.first_mask_s) if cost is None else cost
        self.words: Any = np.zeros((1 + len(draft.tokens), self.matcher.end_token_id // 32 + 1), dtype=np.int32)
        self.error: str | None = None
        self.is_known = [False] * len(self.words)
        self.num_filled = self.num_forced = 0
        self.is_broken = self.is_done = self.is_begun = self.is_slow = self.is_hurried = False

    @property
    def expected_s(self) -> float:
        """Estimated cost of filling, from previous masks."""
        return len(self.words) * self.cost.mask_s

    def hurry(self) -> None:
        """Stop filling masks after drafts; the filling thread stops at the next one."""
        self.is_hurried = True

    def drop(self) -> None:
        """Cancel a fill that has not begun: the output has ended."""
        self.is_begun = self.is_hurried = True

    def run(self) -> None:
        """Fill the masks. The matcher's state is unchanged afterwards."""
        try:
            self._run()
        except Exception as error:
            logger.exception("a mask could not be filled")
            self.error = f"the grammar cannot go on: {type(error).__name__}: {error}"

    def _run(self) -> None:
        matcher, words = self.matcher, self.words
        if self.draft.tokens:
            self._allow_forced()
        self.error = self._fill(0)
        if self.error is not None:
            return
        if self.draft.tokens:
            self.is_broken = not self._walk(set(self.ending_ids))
        for row, is_known in enumerate(self.is_known):
            if is_known:
                _open_ending(words[row], matcher.end_token_id, self.ending_ids)

    def _allow_forced(self) -> None:
        """Write the masks of forced tokens, from the first one on as far as these tokens are drafted."""
        tokens, parents = self.draft.tokens, self.draft.parents
        for row, token_id in enumerate(self.matcher.forced_tokens()):
            self.words[row].view(np.uint32)[token_id // 32] = np.uint32(1 << token_id % 32)
            self.is_known[row] = True
            if row == len(tokens) or tokens[row] != token_id or parents[row] != row - 1:
                return
            self.num_forced += 1

    def _fill(self, row: int) -> str | None:
        """Fill the mask of a row in the matcher's current state, unless it is known; return the error, if any."""
        if self.is_known[row]:
            return None
        error = fill_mask(self.matcher, self.words[row])
        self.is_known[row] = error is None
        self.num_filled += 1
        return error

    def _walk(self, ending_ids: set[int]) -> bool:
        """Advance the matcher along the drafts and back, filling the masks after them; return False if the rollback fails."""
        matcher, draft = self.matcher, self.draft
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(draft.parents):
            children.setdefault(parent, []).append(node)
        path: list[int] = [-1]
        waiting = children.get(-1, [])[::-1]
        while waiting and not self.is_hurried:
            node = waiting.pop()
            depth = path.index(draft.parents[node]) + 1
            if depth < len(path) and matcher.retreat(len(path) - depth) is not None:
                return False
            del path[depth:]
            if not self._allows(node, ending_ids):
                continue
            if matcher.advance(draft.tokens[node]) is not None:
                return False
            path.append(node)
            if matcher.is_complete:
                continue
            if self._fill(1 + node) is not None:
                return False
            waiting += children.get(node, [])[::-1]
        return len(path) == 1 or matcher.retreat(len(path) - 1) is None

    def _allows(self, node: int, ending_ids: set[int]) -> bool:
        token_id = self.draft.tokens[node]
        word = int(self.words[1 + self.draft.parents[node], token_id // 32])
        return token_id not in ending_ids and bool(word >> token_id % 32 & 1)


def fill_mask(matcher: MaskedMatcher, words: Any) -> str | None:
    """Write which tokens may come next into words, numpy [num_mask_words] i32; return the error, if any."""
    error = matcher.source.fill(matcher, words)
    if error is None:
        matcher.restrict(words)
    return error


def _open_ending(words: Any, end_token_id: int, ending_ids: Sequence[int]) -> None:
    """Where the output may end, allow the request's ending tokens instead of the end bit, which is outside the vocabulary."""
    bits = words.view(np.uint32)
    word, bit = divmod(end_token_id, 32)
    if bits[word] >> bit & 1:
        bits[word] &= np.uint32(~(1 << bit) & 0xFFFFFFFF)
        for token_id in ending_ids:
            bits[token_id // 32] |= np.uint32(1 << token_id % 32)
