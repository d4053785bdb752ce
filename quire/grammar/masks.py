"""MaskFill: what may follow one output, and the drafts behind it."""

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
"""What is left, a step later, of what a dear mask makes believe of those to come."""


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """Tokens that may follow; parents: of each the index of the one before it, -1 for those that would come next."""

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()


NO_DRAFT = DraftedTokens()


class MaskCost:
    """What a mask of one output has taken lately, at most: seconds of computing, infinity where nothing is known."""

    __slots__ = ("mask_s",)

    def __init__(self, mask_s: float = math.inf) -> None:
        self.mask_s = mask_s

    def note(self, mask_s: float) -> None:
        """Take in what a mask took."""
        self.mask_s = mask_s if math.isinf(self.mask_s) else max(mask_s, self.mask_s * _FORGET)


class MaskFill:
    """The masks of one output for one step. One thread fills them; no other may touch the matcher until they are done.

    ending_ids  the tokens that are allowed where the output may end
    words       numpy [1 + drafted tokens, at least ceil(vocabulary / 32)] i32: a bit per token, the lowest first: what may come
                next, and then what may follow each drafted token
    error       why the matcher cannot go on; the masks then mean nothing
    num_filled  masks that the matcher was asked for: not those of forced tokens
    num_forced  drafts, the first ones, that are the only tokens which can come there
    is_known    per row whether it is there: not behind a draft that its grammar does not take, where nothing can follow, or
                where there was no time
    is_broken   whether the matcher got lost behind the drafts, and has to be made anew
    is_done     whether all of that is there; set last, by who fills
    is_begun    whether somebody fills them, or has
    is_slow     whether they are filled apart from others
    """

    __slots__ = (
        "_matcher",
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
        self._matcher = cast("MaskedMatcher", matcher)
        self.ending_ids = ending_ids
        self.draft = draft
        self.cost = MaskCost(self._matcher.source.first_mask_s) if cost is None else cost
        self.words: Any = np.zeros((1 + len(draft.tokens), self._matcher.end_token_id // 32 + 1), dtype=np.int32)
        self.error: str | None = None
        self.is_known = [False] * len(self.words)
        self.num_filled = self.num_forced = 0
        self.is_broken = self.is_done = self.is_begun = self.is_slow = self.is_hurried = False

    @property
    def expected_s(self) -> float:
        """What filling them will take, going by the masks before."""
        return len(self.words) * self.cost.mask_s

    def hurry(self) -> None:
        """Have no more masks filled behind drafts; whoever fills stops at the next one."""
        self.is_hurried = True

    def drop(self) -> None:
        """Have nothing filled any more that is not begun: the output has ended."""
        self.is_begun = self.is_hurried = True

    def run(self) -> None:
        """Fill the masks. The matcher stands afterwards where it stood."""
        try:
            self._run()
        except Exception as error:
            logger.exception("a mask could not be filled")
            self.error = f"the grammar cannot go on: {type(error).__name__}: {error}"

    def _run(self) -> None:
        matcher, words = self._matcher, self.words
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
        """Write the masks where the grammar forces a token, from the first one on and as far as those tokens are drafted."""
        tokens, parents = self.draft.tokens, self.draft.parents
        for row, token_id in enumerate(self._matcher.forced_tokens()):
            self.words[row].view(np.uint32)[token_id // 32] = np.uint32(1 << token_id % 32)
            self.is_known[row] = True
            if row == len(tokens) or tokens[row] != token_id or parents[row] != row - 1:
                return
            self.num_forced += 1

    def _fill(self, row: int) -> str | None:
        """Fill the mask of a row, where the matcher stands, unless it is known; return what went wrong."""
        if self.is_known[row]:
            return None
        error = fill_mask(self._matcher, self.words[row])
        self.is_known[row] = error is None
        self.num_filled += 1
        return error

    def _walk(self, ending_ids: set[int]) -> bool:
        """Take the matcher along the drafts and back, and fill the masks behind them; return False where it is lost."""
        matcher, draft = self._matcher, self.draft
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
    """Write what may come next into words, numpy [num_mask_words] i32; return what went wrong."""
    error = matcher.source.fill(matcher, words)
    if error is None:
        matcher.narrow(words)
    return error


def _open_ending(words: Any, end_token_id: int, ending_ids: Sequence[int]) -> None:
    """Where the output may end, allow the request's ending tokens instead of the end, which the vocabulary does not have."""
    bits = words.view(np.uint32)
    word, bit = divmod(end_token_id, 32)
    if bits[word] >> bit & 1:
        bits[word] &= np.uint32(~(1 << bit) & 0xFFFFFFFF)
        for token_id in ending_ids:
            bits[token_id // 32] |= np.uint32(1 << token_id % 32)
