"""BannedGrammar: a grammar without some phrases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from quire.contracts.constraint import Grammar
from quire.grammar.matcher import MaskedMatcher, WrappingMatcher
from quire.grammar.phrases import BannedPhrases

_MAX_LOOKED_BEHIND = 16
"""Tokens of a mask that are looked behind; where more are allowed, it is free text as a rule, and nothing is forced."""
_MAX_MASKS_BEHIND = 16
"""Masks that are filled in one look, behind tokens with which a phrase has begun."""


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


@dataclass(slots=True)
class _Look:
    num_masks: int = 0


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
        look = _Look()
        for token_id in _few_tokens(words):
            if token_id != self.end_token_id and self._runs_into_phrase(token_id, self._states[-1], look):
                words.view(np.uint32)[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)

    def _runs_into_phrase(self, token_id: int, state: int, look: _Look) -> bool:
        """Whether all that the grammar allows behind a token, as far as the look goes, has a phrase in it."""
        if self._inner.advance(token_id) is not None:
            return False
        state = self._phrases.after(state, token_id)
        behind = self._phrases.through(state, self._inner.forced_bytes())
        is_met = behind is None or (behind != 0 and self._is_dead_end(state, look))
        error = self._inner.retreat(1)
        if error is not None:
            raise RuntimeError(error)
        return is_met

    def _is_dead_end(self, state: int, look: _Look) -> bool:
        if look.num_masks == _MAX_MASKS_BEHIND or self._inner.is_complete:
            return False
        look.num_masks += 1
        mask = self._phrases.mask(state)
        words = np.zeros_like(mask)
        if self.source.fill(self._inner, words) is not None:
            return False
        words &= mask
        if not words.any():
            return True
        following = _few_tokens(words)
        return bool(following) and all(
            token_id != self.end_token_id and self._runs_into_phrase(token_id, state, look) for token_id in following
        )

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

    def fork_ahead(self) -> BannedMatcher:
        """See MaskedMatcher."""
        return BannedMatcher(self._inner.fork_ahead(), self._phrases, self._states[-1:])


def _few_tokens(words: Any) -> list[int]:
    """Return the tokens of a mask, none where they are many."""
    places = np.flatnonzero(words)
    if len(places) > _MAX_LOOKED_BEHIND:
        return []
    bits = np.unpackbits(words[places].view(np.uint8), bitorder="little").reshape(len(places), 32)
    rows, columns = np.nonzero(bits)
    found = (places[rows] * 32 + columns).tolist()
    return found if len(found) <= _MAX_LOOKED_BEHIND else []
