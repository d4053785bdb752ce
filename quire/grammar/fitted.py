"""FittedGrammar: a grammar of JSON whose outputs come to an end before the tokens do that they may have.

While there is room, nothing is changed. A matcher looks now and then how many tokens the shortest end that it finds would take;
when hardly more are left, what is open is closed, optional parts are left out, and at last that end is all that is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from quire.contracts.constraint import Grammar
from quire.grammar.endings import OUTSIDE, Ending, JsonEndings
from quire.grammar.matcher import MaskedMatcher, MaskSource

_TEXT_TOKENS = 6
"""Tokens that are kept free for each string that is still to come."""
_SPARE_TOKENS = 4
_MAX_PATIENCE = 64
_MAX_ENDING = 256
"""Tokens of an end that is looked for, and tokens before the limit from which on it is; what needs more is left to itself."""
_MAX_FAILURES = 3
"""How often no end may be found until the output is left to itself."""


@dataclass(frozen=True, slots=True)
class _Look:
    """What was found after `count` tokens: what to do from there on until after `until` tokens.

    forced        an end that is to be taken; None: not yet
    num_failures  how often in a row no end was found
    """

    count: int
    until: int
    is_closing: bool = False
    forced: tuple[int, ...] | None = None
    num_failures: int = 0


class FittedGrammar:
    """See contracts.constraint.Grammar.

    max_tokens  of an output; one that ends sooner than that anyway is not changed
    """

    def __init__(self, grammar: Grammar, endings: JsonEndings, max_tokens: int) -> None:
        self._grammar = grammar
        self._endings = endings
        self._max_tokens = max_tokens

    def new_matcher(self) -> FittedMatcher:
        """See Grammar."""
        return FittedMatcher(cast("MaskedMatcher", self._grammar.new_matcher()), self._endings, self._max_tokens)


class FittedMatcher:
    """See MaskedMatcher. What it does is a function of the tokens, also after a retreat."""

    __slots__ = ("_endings", "_inner", "_looks", "_max_tokens", "_places", "end_token_id")

    def __init__(self, inner: MaskedMatcher, endings: JsonEndings, max_tokens: int) -> None:
        self._inner = inner
        self._endings = endings
        self._max_tokens = max_tokens
        self._places = [OUTSIDE]
        self._looks = [_Look(-1, max(0, max_tokens - _MAX_ENDING))]
        self.end_token_id = inner.end_token_id

    @property
    def state(self) -> Any:
        """See MaskedMatcher."""
        return self._inner.state

    @property
    def source(self) -> MaskSource:
        """See MaskedMatcher."""
        return self._inner.source

    @property
    def _count(self) -> int:
        return len(self._places) - 1

    def _look(self) -> _Look:
        """Return what to do now, after looking where it is time to."""
        last = self._looks[-1]
        if last.forced is not None or self._count < last.until:
            return last
        count, num_left = self._count, self._max_tokens - self._count
        ending = self._endings.find(self._inner, self._places[-1], min(num_left, _MAX_ENDING))
        if ending is not None:
            found = self._judge(ending)
        elif last.num_failures + 1 == _MAX_FAILURES:
            found = _Look(count, self._max_tokens)
        else:
            found = _Look(count, count + max(8, num_left // 4), num_failures=last.num_failures + 1)
        self._looks.append(found)
        return found

    def _judge(self, ending: Ending) -> _Look:
        count = self._count
        spare = self._max_tokens - count - len(ending.tokens)
        if spare <= _SPARE_TOKENS:
            return _Look(count, count, True, ending.tokens)
        spare -= _SPARE_TOKENS + min(_TEXT_TOKENS * ending.num_texts, self._max_tokens // 4)
        return _Look(count, count + 1, True) if spare <= 0 else _Look(count, count + min(_MAX_PATIENCE, max(1, spare // 3)))

    def narrow(self, words: Any) -> None:
        """See MaskedMatcher."""
        self._inner.narrow(words)
        look = self._look()
        if look.forced is not None:
            ahead = look.forced[self._count - look.count :]
            if ahead:
                words[:] = 0
                words.view(np.uint32)[ahead[0] // 32] = np.uint32(1 << ahead[0] % 32)
        elif look.is_closing:
            closing = self._endings.closing_mask(self._places[-1])
            if closing is not None:
                left = words[: len(closing)] & closing
                if left.any():
                    words[: len(closing)] = left

    def advance(self, token_id: int) -> str | None:
        """See GrammarMatcher."""
        self._look()
        error = self._inner.advance(token_id)
        if error is None:
            self._places.append(self._endings.after(self._places[-1], token_id))
        return error

    def retreat(self, num_tokens: int) -> str | None:
        """See GrammarMatcher."""
        error = self._inner.retreat(num_tokens)
        if error is None:
            del self._places[len(self._places) - num_tokens :]
            while self._looks[-1].count > self._count:
                self._looks.pop()
        return error

    def num_fitting(self, token_ids: Sequence[int]) -> int | None:
        """See GrammarMatcher. Only as far as it has looked."""
        count = self._inner.num_fitting(token_ids)
        if count is None:
            return None
        last = self._looks[-1]
        if last.forced is not None:
            ahead = last.forced[self._count - last.count :]
            pairs = zip(token_ids[:count], ahead, strict=False)
            return next((index for index, (one, other) in enumerate(pairs) if one != other), min(count, len(ahead)))
        return 0 if last.is_closing else min(count, max(0, last.until - self._count))

    def forced_tokens(self) -> Sequence[int]:
        """See GrammarMatcher."""
        last = self._looks[-1]
        if last.forced is not None:
            return last.forced[self._count - last.count :]
        forced = self._inner.forced_tokens()
        return forced[: self.num_fitting(forced) or 0] if forced else forced

    def fork(self) -> FittedMatcher:
        """See GrammarMatcher."""
        other = FittedMatcher(self._inner.fork(), self._endings, self._max_tokens)
        other._places, other._looks = list(self._places), list(self._looks)
        return other

    @property
    def can_end(self) -> bool:
        """See GrammarMatcher."""
        return self._inner.can_end

    @property
    def is_complete(self) -> bool:
        """See GrammarMatcher."""
        return self._inner.is_complete or (self._looks[-1].is_closing and self._inner.can_end)
