"""SpecialTexts: finds the spellings of special tokens, which are not text, in the texts of a grammar."""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.grammar.vocabulary import Vocabulary


class SpecialTexts:
    """Splits texts at spellings of special tokens.

    ids  of the special tokens, by spelling
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        ordered = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> SpecialTexts:
        """Return the instance for a vocabulary."""
        spelled = {
            vocabulary.tokens[token_id].decode("utf-8", errors="replace"): token_id for token_id in vocabulary.special_token_ids
        }
        return cls(
            {text: token_id for text, token_id in spelled.items() if text and vocabulary.special_id_of(text) is not None}
        )

    def split(self, text: str) -> list[str | int]:
        """Return the parts of a text, special tokens as their ids; empty for an empty text."""
        parts = [text] if self._pattern is None else self._pattern.split(text)
        return [self.ids.get(part, part) for part in parts if part]
