"""JsonEndings: how an output that is JSON could come to its end in few tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.grammar.masks import fill_next
from quire.grammar.matcher import MaskedMatcher
from quire.grammar.vocabulary import Vocabulary

OUTSIDE, IN_STRING, AFTER_BACKSLASH = range(3)
"""Where in JSON a text stands."""

_NEVER = 99
_MAX_MASKS = 128
"""Masks that are filled in search of one end: they cost up to a millisecond each, while a step waits."""
_MAX_LENGTH = 255
_CLOSES_STRING = re.compile(rb'"(?:[}\]]*|:)')
_CLOSES_ITEM = re.compile(rb"[}\]]+")
_RANKS_OUTSIDE = tuple(
    re.compile(pattern)
    for pattern in (
        rb"[}\]]+", rb',"?', rb':"?', rb"null|true|false|\[\]|\{\}|\"\"", rb"[0-9]", rb"[0-9]+", rb'"', rb"\[", rb"\{",
        rb"[^ \t\r\n][\x00-\xff]*",
    )
)  # fmt: skip
"""What comes to an end soonest first; of equal ones the longest token. A comma comes after what would do without one."""
_RANKS_IN_STRING = (_CLOSES_STRING, re.compile(rb"[A-Za-z0-9 ]*[A-Za-z0-9][A-Za-z0-9 ]*"), re.compile(rb"[^\\][\x00-\xff]*"))


@dataclass(frozen=True, slots=True)
class Ending:
    """Tokens that end an output; num_texts: how many strings begin in them, keys too."""

    tokens: tuple[int, ...]
    num_texts: int


class JsonEndings:
    """The tokens of a vocabulary by how soon they bring JSON to an end."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        self.num_words = vocabulary.num_mask_words
        size = vocabulary.size
        outside = np.full(size, _NEVER, dtype=np.int64)
        inside = np.full(size, _NEVER, dtype=np.int64)
        closes_string = np.zeros(self.num_words * 32, dtype=np.bool_)
        closes_item = closes_string.copy()
        for token_id, token in enumerate(self._tokens):
            if token and token_id not in vocabulary.special_token_ids:
                left = _MAX_LENGTH - min(len(token), _MAX_LENGTH)
                outside[token_id] = _rank(token, _RANKS_OUTSIDE) * (_MAX_LENGTH + 1) + left
                inside[token_id] = _rank(token, _RANKS_IN_STRING) * (_MAX_LENGTH + 1) + left
                closes_string[token_id] = _CLOSES_STRING.fullmatch(token) is not None
                closes_item[token_id] = _CLOSES_ITEM.fullmatch(token) is not None
        self._scores = (outside, inside, inside)
        self._kinds = np.array([_kind(token) for token in self._tokens], dtype=np.int8)
        self._closing = (_pack(closes_item), _pack(closes_string))

    def after(self, place: int, token_id: int) -> int:
        """Return where the text stands behind one more token."""
        token = self._tokens[token_id] if token_id < len(self._tokens) else b""
        if b'"' not in token and b"\\" not in token:
            return IN_STRING if place == AFTER_BACKSLASH and token else place
        for byte in token:
            if place == AFTER_BACKSLASH:
                place = IN_STRING
            elif byte == 0x22:
                place = OUTSIDE if place == IN_STRING else IN_STRING
            elif byte == 0x5C and place == IN_STRING:
                place = AFTER_BACKSLASH
        return place

    def closing_mask(self, place: int) -> Any:
        """Return the tokens that close what is open, numpy [num_mask_words] i32; None where a character is half written."""
        return None if place == AFTER_BACKSLASH else self._closing[place]

    def find(self, matcher: MaskedMatcher, place: int, limit: int) -> Ending | None:
        """Return how an output can end that stands at `place`; None where no way is found within `limit` tokens."""
        walk = _Walk(matcher.fork(), place)
        words = np.zeros((1, matcher.end_token_id // 32 + 1), dtype=np.int32)
        tried: dict[bytes, set[int]] = {}
        num_masks = 0
        while not walk.matcher.can_end:
            forced = walk.matcher.forced_tokens()
            if not forced:
                num_masks += 1
                if num_masks > _MAX_MASKS or fill_next([walk.matcher], words) != [None]:
                    return None
                token_id = self._choose(words, walk.place, tried.setdefault(words.tobytes(), set()))
                forced = () if token_id is None else (token_id,)
            place = walk.place
            if not forced or len(walk.tokens) + len(forced) > limit or not all(walk.take(self, one) for one in forced):
                return None
            if (walk.place == OUTSIDE) != (place == OUTSIDE):
                tried.clear()
        return Ending(tuple(walk.tokens), walk.num_texts)

    def _choose(self, words: Any, place: int, tried: set[int]) -> int | None:
        """Return the best token that a mask allows, of another kind than those tried at this mask, where there is one.

        A mask that comes again shows that what was tried leads nowhere: digits, say, where a slash has to come.
        """
        bits = np.unpackbits(words.view(np.uint8)[0], bitorder="little")[: len(self._tokens)]
        allowed = np.flatnonzero(bits)
        if not len(allowed):
            return None
        if tried:
            others = allowed[~np.isin(self._kinds[allowed], list(tried))]
            allowed = others if len(others) else allowed
        token_id = int(allowed[np.argmin(self._scores[place][allowed])])
        tried.add(int(self._kinds[token_id]))
        return token_id


@dataclass(slots=True)
class _Walk:
    """The way to an end: the tokens so far, and where they lead."""

    matcher: MaskedMatcher
    place: int
    tokens: list[int] = field(default_factory=list[int])
    num_texts: int = 0

    def take(self, endings: JsonEndings, token_id: int) -> bool:
        """Go on by a token; return whether it fits."""
        if self.matcher.advance(token_id) is not None:
            return False
        place = endings.after(self.place, token_id)
        self.num_texts += self.place == OUTSIDE and place == IN_STRING
        self.place = place
        self.tokens.append(token_id)
        return True


def _kind(token: bytes) -> int:
    if token.isdigit():
        return 0
    if token.isalpha():
        return 1
    return 2 if token.isspace() else 3 + min(token[0] // 16 if token else 0, 15)


def _rank(token: bytes, patterns: tuple[re.Pattern[bytes], ...]) -> int:
    return next((rank for rank, pattern in enumerate(patterns) if pattern.fullmatch(token)), len(patterns))


def _pack(bits: Any) -> Any:
    return np.packbits(bits, bitorder="little").view(np.int32)
