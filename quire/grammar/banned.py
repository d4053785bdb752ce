"""BannedGrammar: a grammar without some phrases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from quire.contracts.constraint import Grammar
from quire.grammar.matcher import MaskedMatcher, WrappingMatcher
from quire.grammar.phrases import BannedPhrases


class BannedGrammar:
    """See contracts.constraint.Grammar. A phrase may begin in what stands before the output, and is banned there too.

    start  the state of the phrases where the output begins
    """

    def __init__(self, grammar: Grammar, phrases: BannedPhrases, start: int = 0) -> None:
        self._grammar = grammar
        self._phrases = phrases
        self._start = start

    def behind(self, token_ids: Sequence[int]) -> BannedGrammar:
        """Return the same for outputs behind a prompt."""
        return BannedGrammar(self._grammar, self._phrases, self._phrases.start_behind(token_ids))

    def new_matcher(self) -> BannedMatcher:
        """See Grammar."""
        return BannedMatcher(cast("MaskedMatcher", self._grammar.new_matcher()), self._phrases, [self._start])


class BannedMatcher(WrappingMatcher):
    """See MaskedMatcher."""

    __slots__ = ("_phrases", "_states")

    def __init__(self, inner: MaskedMatcher, phrases: BannedPhrases, states: list[int]) -> None:
        super().__init__(inner)
        self._phrases = phrases
        self._states = states

    def narrow(self, words: Any) -> None:
        """See MaskedMatcher."""
        self._inner.narrow(words)
        mask = self._phrases.mask(self._states[-1])
        words[: len(mask)] &= mask

    def advance(self, token_id: int) -> str | None:
        """See GrammarMatcher."""
        error = self._inner.advance(token_id)
        if error is None:
            self._states.append(self._phrases.after(self._states[-1], token_id))
        return error

    def retreat(self, num_tokens: int) -> str | None:
        """See GrammarMatcher."""
        error = self._inner.retreat(num_tokens)
        if error is None:
            del self._states[len(self._states) - num_tokens :]
        return error

    def num_fitting(self, token_ids: Sequence[int]) -> int | None:
        """See GrammarMatcher."""
        count = super().num_fitting(token_ids)
        if count is None:
            return None
        state = self._states[-1]
        for index, token_id in enumerate(token_ids[:count]):
            if self._phrases.forbids(state, token_id):
                return index
            state = self._phrases.after(state, token_id)
        return count

    def fork(self) -> BannedMatcher:
        """See GrammarMatcher."""
        return BannedMatcher(self._inner.fork(), self._phrases, self._states[-1:])
