"""SpecialTexts: finds special tokens, which are no text, in the texts that a grammar is given."""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.grammar.vocabulary import Vocabulary


class SpecialTexts:
    """Splits texts where a special token is spelled.

    ids  of the special tokens, by how they are spelled
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        ordered = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> SpecialTexts:
        """Return the one of a vocabulary."""
        spelled = {
            vocabulary.tokens[token_id].decode("utf-8", errors="replace"): token_id for token_id in vocabulary.special_token_ids
        }
        return cls(
            {text: token_id for text, token_id in spelled.items() if text and vocabulary.special_id_of(text) is not None}
        )

    def split(self, text: str) -> list[str | int]:
        """Return the parts of a text, a special token as its id; none where it is empty."""
        parts = [text] if self._pattern is None else self._pattern.split(text)
        return [self.ids.get(part, part) for part in parts if part]
