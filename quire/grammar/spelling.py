"""Spelling: the tokens of a text that continues an output, byte for byte; used wherever text is forced or injected."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property

from quire.grammar.errors import GrammarError

_MAX_SHOWN = 60
"""Maximum number of characters of a text in an error message."""
_UTF8_BYTES = (*range(0x80), *range(0x80, 0xC0), *range(0xC2, 0xF5))
"""The bytes that occur in UTF-8."""


class Spelling:
    """Spells texts with the tokens of a vocabulary.

    tokens             the bytes of each token; b"" for one without a text
    special_token_ids  tokens that are not text
    encode             functions from text to tokens as in training, tried in order; the bytes of the tokens may differ from
                       those of the text: a tokenizer may add a leading space, normalize, or find special tokens
    """

    def __init__(
        self, tokens: Sequence[bytes], special_token_ids: Collection[int], encode: Sequence[Callable[[str], list[int]]]
    ) -> None:
        self._tokens = tokens
        self._special = frozenset(special_token_ids)
        self._encode = tuple(encode)

    def encode(self, text: str) -> list[int]:
        """Return tokens with the bytes of the text; if it cannot be spelled, those of its longest possible prefix."""
        spelled = text.encode("utf-8")
        for encode in self._encode:
            token_ids = encode(text)
            if self._bytes_of(token_ids) == spelled:
                return token_ids
        return self._fewest_tokens(spelled)[0]

    def check(self, text: str) -> None:
        """Raise GrammarError, with the text and the character, if the tokens cannot spell the text."""
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
        """Whether all texts can be spelled, because each byte has a token: byte-level, or <0x00> to <0xFF>."""
        return all(bytes([byte]) in self._ids for byte in _UTF8_BYTES)

    def _bytes_of(self, token_ids: Sequence[int]) -> bytes | None:
        """Return the bytes of tokens, None if one is not text."""
        size = len(self._tokens)
        if any(token_id >= size or token_id in self._special for token_id in token_ids):
            return None
        return b"".join([self._tokens[token_id] for token_id in token_ids])

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """The tokens by their bytes; of <0x61> and `a` the latter, which has the higher id."""
        return {token: token_id for token_id, token in enumerate(self._tokens) if token and token_id not in self._special}

    @cached_property
    def _lengths(self) -> dict[bytes, list[int]]:
        """Possible lengths of tokens by their first two bytes."""
        found: dict[bytes, set[int]] = {}
        for token in self._ids:
            found.setdefault(token[:2], set()).add(len(token))
        return {start: sorted(lengths) for start, lengths in found.items()}

    def _fewest_tokens(self, text: bytes) -> tuple[list[int], int]:
        """Return the fewest tokens that spell the text, or its longest possible prefix, and the number of bytes spelled."""
        ids, lengths = self._ids, self._lengths
        # For each position the number of tokens before it, and the last of them; unreachable positions are absent.
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
