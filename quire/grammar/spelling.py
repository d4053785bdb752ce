"""Spelling: the tokens of a text that continues an output, byte for byte; everything that forces or injects text asks here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property

from quire.grammar.errors import GrammarError

_MAX_SHOWN = 60
"""Characters of a text that an error message shows."""
_UTF8_BYTES = (*range(0x80), *range(0x80, 0xC0), *range(0xC2, 0xF5))
"""The bytes that UTF-8 may have."""


class Spelling:
    """How texts are written with the tokens of a vocabulary.

    tokens             the bytes of each token; b"" for one without a text
    special_token_ids  tokens that are no text
    encode             functions from text to tokens as the model was trained to see them, which are tried in order; the bytes
                       of the tokens may differ from those of the text: a tokenizer may put a space before a text, normalize it,
                       or find special tokens in it
    """

    def __init__(
        self, tokens: Sequence[bytes], special_token_ids: Collection[int], encode: Sequence[Callable[[str], list[int]]]
    ) -> None:
        self._tokens = tokens
        self._special = frozenset(special_token_ids)
        self._encode = tuple(encode)

    def encode(self, text: str) -> list[int]:
        """Return tokens whose bytes are those of the text; of a text that cannot be spelled, those of its longest beginning."""
        spelled = text.encode("utf-8")
        for encode in self._encode:
            token_ids = encode(text)
            if self._bytes_of(token_ids) == spelled:
                return token_ids
        return self._fewest_tokens(spelled)[0]

    def check(self, text: str) -> None:
        """Raise GrammarError, with the text and the character, where the tokens cannot spell the text."""
        spelled = text.encode("utf-8")
        if self.is_complete:
            return
        num_spelled = self._fewest_tokens(spelled)[1]
        if num_spelled < len(spelled):
            at = len(spelled[:num_spelled].decode("utf-8", errors="ignore"))
            missing = f"{text[at]!r} (U+{ord(text[at]):04X})"
            whole = "" if len(text) == 1 else f" of the text {_shown(text)}"
            raise GrammarError(f"no tokens of this model spell {missing}{whole}")

    @cached_property
    def is_complete(self) -> bool:
        """Whether all texts can be spelled, because each byte is a token: byte-level, or <0x00> to <0xFF>."""
        return all(bytes([byte]) in self._ids for byte in _UTF8_BYTES)

    def _bytes_of(self, token_ids: Sequence[int]) -> bytes | None:
        """Return the bytes of tokens, None where one is no text."""
        size = len(self._tokens)
        if any(token_id >= size or token_id in self._special for token_id in token_ids):
            return None
        return b"".join([self._tokens[token_id] for token_id in token_ids])

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """The tokens by their bytes; of <0x61> and `a` the latter, which comes later."""
        return {token: token_id for token_id, token in enumerate(self._tokens) if token and token_id not in self._special}

    @cached_property
    def _lengths(self) -> dict[bytes, list[int]]:
        """How long tokens are, by their first two bytes."""
        found: dict[bytes, set[int]] = {}
        for token in self._ids:
            found.setdefault(token[:2], set()).add(len(token))
        return {start: sorted(lengths) for start, lengths in found.items()}

    def _fewest_tokens(self, text: bytes) -> tuple[list[int], int]:
        """Return as few tokens as spell the text, or its longest beginning, and how many bytes they spell."""
        ids, lengths = self._ids, self._lengths
        # For each place the number of tokens before it, and the last of them; a place that no tokens lead to is absent.
        best: dict[int, tuple[int, int]] = {0: (0, -1)}
        furthest = 0
        for place in range(len(text)):
            if place not in best:
                continue
            num_tokens = best[place][0] + 1
            starts = {text[place : place + 1], text[place : place + 2]}
            for length in sorted({length for start in starts for length in lengths.get(start, ())}):
                end = place + length
                token_id = ids.get(text[place:end]) if end <= len(text) else None
                if token_id is not None and (end not in best or num_tokens < best[end][0]):
                    best[end] = (num_tokens, token_id)
                    furthest = max(furthest, end)
        token_ids: list[int] = []
        place = furthest
        while place:
            token_id = best[place][1]
            token_ids.append(token_id)
            place -= len(self._tokens[token_id])
        return token_ids[::-1], furthest


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "...")
