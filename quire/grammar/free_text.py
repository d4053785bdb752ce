"""FreeGrammar: allows all tokens; wrappers remove what a request bans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.grammar.matcher import MaskedMatcher, StateMatcher
from quire.grammar.vocabulary import Vocabulary


class FreeGrammar:
    """See contracts.constraint.Grammar."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._end_token_id = vocabulary.end_token_id
        self._masks = _Everything(vocabulary.end_token_id)

    def new_matcher(self) -> FreeMatcher:
        """See Grammar."""
        return FreeMatcher(None, self._masks, self._end_token_id)


class _Everything:
    first_mask_s = 0.0

    def __init__(self, end_token_id: int) -> None:
        bits = np.zeros((end_token_id // 32 + 1) * 32, dtype=np.bool_)
        bits[: end_token_id + 1] = True
        self._words = np.packbits(bits, bitorder="little").view(np.int32)

    def fill(self, matcher: MaskedMatcher, words: Any) -> str | None:
        """See MaskSource."""
        words[: len(self._words)] = self._words
        return None


class FreeMatcher(StateMatcher):
    """See MaskedMatcher; it has no state."""

    __slots__ = ()

    def forced_bytes(self) -> bytes:
        """See MaskedMatcher."""
        return b""

    def restrict(self, words: Any) -> None:
        """See MaskedMatcher."""

    def advance(self, token_id: int) -> str | None:
        """See GrammarMatcher."""
        return None

    def retreat(self, num_tokens: int) -> str | None:
        """See GrammarMatcher."""
        return None

    def num_fitting(self, token_ids: Sequence[int]) -> int | None:
        """See GrammarMatcher."""
        return len(token_ids)

    def forced_tokens(self) -> Sequence[int]:
        """See GrammarMatcher."""
        return ()

    def fork(self) -> FreeMatcher:
        """See GrammarMatcher."""
        return self

    def fork_ahead(self) -> FreeMatcher:
        """See MaskedMatcher."""
        return self.fork()

    @property
    def can_end(self) -> bool:
        """See GrammarMatcher."""
        return True

    @property
    def has_given_up(self) -> bool:
        """See GrammarMatcher."""
        return False

    @property
    def is_complete(self) -> bool:
        """See GrammarMatcher."""
        return False
