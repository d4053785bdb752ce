"""MaskFiller: the masks of a step's constrained sequences, filled while the model runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from quire.contracts.constraint import GrammarMatcher
from quire.grammar.matcher import MaskedMatcher, MaskSource

_MAX_INLINE_MATCHERS = 2
_MAX_INLINE_S = 2e-4
"""What masks may take for the caller to fill them: to wake a thread, which then wants the interpreter too, takes longer."""
_FORGET = 0.5
"""What is left, a step later, of what a dear mask makes believe of those to come."""


@dataclass(frozen=True, slots=True)
class Masks:
    """What every matcher allows next.

    words      numpy [num_matchers + drafted tokens, at least ceil(vocabulary / 32)] i32: a bit per token, the lowest first.
               What may follow drafted tokens comes after the first num_matchers rows, matcher by matcher
    errors     why a matcher cannot go on; its mask then means nothing
    is_known   per row whether it was filled: not behind a draft that its grammar does not take, or where nothing can follow
    is_broken  per matcher whether it got lost behind its drafts, and has to be made anew
    """

    words: Any
    errors: list[str | None]
    is_known: list[bool]
    is_broken: list[bool]


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """Tokens that may follow; parents: of each the index of the one before it, -1 for those that would come next."""

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()


class MaskFiller:
    """Fills masks in a thread of its own, which takes its time while the caller computes. Not thread-safe.

    Those of one or two matchers are filled at once instead, where they take next to no time.
    clock  seconds that the calling thread has computed
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._clock = clock
        self._cost_s = math.inf  # of a mask, lately at most

    def start(
        self,
        matchers: Sequence[GrammarMatcher],
        ending_ids: Sequence[Sequence[int]],
        drafts: Sequence[DraftedTokens] | None = None,
    ) -> Future[Masks]:
        """Begin to fill; no matcher may be advanced before the result is there.

        ending_ids  per matcher the tokens that are allowed where the output may end
        drafts      per matcher
        """
        num_masks = len(matchers) + sum(len(draft.tokens) for draft in drafts or ())
        if len(matchers) <= _MAX_INLINE_MATCHERS and num_masks * self._cost_s <= _MAX_INLINE_S:
            filled: Future[Masks] = Future()
            try:
                filled.set_result(self._fill(matchers, ending_ids, drafts))
            except Exception as error:  # noqa: BLE001 - raised where the masks are wanted, as from the thread
                filled.set_exception(error)
            return filled
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-masks")
        return self._thread.submit(self._fill, matchers, ending_ids, drafts)

    def _fill(
        self,
        matchers: Sequence[GrammarMatcher],
        ending_ids: Sequence[Sequence[int]],
        drafts: Sequence[DraftedTokens] | None,
    ) -> Masks:
        if len(matchers) > _MAX_INLINE_MATCHERS:
            # They may be shared out among threads, whose time the clock does not see: nothing is learned of what they cost.
            return fill_masks(matchers, ending_ids, drafts)
        begin_s = self._clock()
        masks = fill_masks(matchers, ending_ids, drafts)
        cost_s = (self._clock() - begin_s) / len(masks.is_known)
        self._cost_s = cost_s if math.isinf(self._cost_s) else max(cost_s, self._cost_s * _FORGET)
        return masks

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()


def fill_masks(
    matchers: Sequence[GrammarMatcher],
    ending_ids: Sequence[Sequence[int]],
    drafts: Sequence[DraftedTokens] | None = None,
) -> Masks:
    """Return the masks of some matchers, which stand afterwards where they stood; see MaskFiller.start."""
    masked = cast("Sequence[MaskedMatcher]", matchers)
    num_words = max(matcher.end_token_id for matcher in masked) // 32 + 1
    num_drafted = 0 if drafts is None else sum(len(draft.tokens) for draft in drafts)
    words = np.zeros((len(masked) + num_drafted, num_words), dtype=np.int32)
    errors = fill_next(masked, words)
    is_known = [error is None for error in errors] + [False] * num_drafted
    is_broken = [False] * len(masked)
    owners = list(range(len(masked)))
    for index, draft in enumerate(drafts or ()):
        if errors[index] is None and draft.tokens:
            walk = _DraftWalk(masked[index], draft, index, len(owners), set(ending_ids[index]))
            is_broken[index] = not walk.fill(words, is_known)
        owners += [index] * len(draft.tokens)
    for row, index in enumerate(owners):
        if is_known[row]:
            _open_ending(words[row], masked[index].end_token_id, ending_ids[index])
    return Masks(words, errors, is_known, is_broken)


def fill_next(matchers: Sequence[MaskedMatcher], words: Any) -> list[str | None]:
    """Fill the first rows, one per matcher; return what went wrong for each."""
    groups: dict[int, tuple[MaskSource, list[int]]] = {}
    for index, matcher in enumerate(matchers):
        groups.setdefault(id(matcher.source), (matcher.source, []))[1].append(index)
    errors: list[str | None] = [None] * len(matchers)
    for source, indices in groups.values():
        part = words[: len(matchers)] if len(groups) == 1 else np.zeros((len(indices), words.shape[1]), dtype=np.int32)
        found = source.fill([matchers[index] for index in indices], part)
        if len(groups) > 1:
            words[indices] = part
        for index, error in zip(indices, found, strict=True):
            errors[index] = error
            if error is None:
                matchers[index].narrow(words[index])
    return errors


@dataclass(frozen=True, slots=True)
class _DraftWalk:
    """Takes a matcher along a tree of drafted tokens and back.

    root, first  rows of the mask of what comes next, and of that behind draft token 0
    """

    matcher: MaskedMatcher
    draft: DraftedTokens
    root: int
    first: int
    ending_ids: set[int]

    def fill(self, words: Any, is_known: list[bool]) -> bool:
        """Fill the masks behind all tokens that can be reached; return False where the matcher is lost."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.draft.parents):
            children.setdefault(parent, []).append(node)
        path: list[int] = [-1]
        waiting = children.get(-1, [])[::-1]
        while waiting:
            node = waiting.pop()
            depth = path.index(self.draft.parents[node]) + 1
            if depth < len(path) and self.matcher.retreat(len(path) - depth) is not None:
                return False
            del path[depth:]
            if not self._is_allowed(node, words):
                continue
            if self.matcher.advance(self.draft.tokens[node]) is not None:
                return False
            path.append(node)
            if self.matcher.is_complete:
                continue
            row = self.first + node
            if fill_next([self.matcher], words[row : row + 1]) != [None]:
                return False
            is_known[row] = True
            waiting += children.get(node, [])[::-1]
        return len(path) == 1 or self.matcher.retreat(len(path) - 1) is None

    def _is_allowed(self, node: int, words: Any) -> bool:
        token_id, parent = self.draft.tokens[node], self.draft.parents[node]
        word = int(words[self.root if parent < 0 else self.first + parent, token_id // 32])
        return token_id not in self.ending_ids and bool(word >> token_id % 32 & 1)


def _open_ending(words: Any, end_token_id: int, ending_ids: Sequence[int]) -> None:
    """Where the output may end, allow the request's ending tokens instead of the end, which the vocabulary does not have."""
    bits = words.view(np.uint32)
    word, bit = divmod(end_token_id, 32)
    if bits[word] >> bit & 1:
        bits[word] &= np.uint32(~(1 << bit) & 0xFFFFFFFF)
        for token_id in ending_ids:
            bits[token_id // 32] |= np.uint32(1 << token_id % 32)
