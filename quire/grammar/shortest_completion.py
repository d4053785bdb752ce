"""ShortestCompletions: finds short completions of an output that is JSON."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.grammar.masks import fill_mask
from quire.grammar.matcher import MaskedMatcher
from quire.grammar.reasoning_prefix import FIRST_TEXT_PLACE, ReasoningPrefix, TextPlaces
from quire.grammar.special_tokens import SpecialTexts
from quire.grammar.string_forms import NO_FORMS, StringForms
from quire.grammar.vocabulary import Vocabulary

OUTSIDE, IN_STRING, AFTER_BACKSLASH = range(3)
"""Lexical states of JSON output; values from FIRST_TEXT_PLACE on are states of the text before it."""

_NEVER = 1 << 20
MAX_MASKS = 128
"""Maximum number of masks filled in one search: they cost up to a millisecond each, while a step may wait."""
_MAX_COMPLETED = 8
_FEW_WORDS = 64
_FIRST_TOKENS = 512
"""Number of tokens that are checked first, those that complete the output soonest; one of them is usually allowed."""
_MAX_LENGTH = 255
_CLOSES_STRING = re.compile(rb'"(?:[}\]]*|:)')
_CLOSES_ITEM = re.compile(rb"[}\]]+")
_PUNCTUATION = re.compile(rb'[]":,{}[]+')
_RANKS_OUTSIDE = tuple(
    re.compile(pattern)
    for pattern in (
        rb"[}\]]+", rb',"?', rb':"?', rb"null|true|false|\[\]|\{\}|\"\"", rb"[0-9]", rb"[0-9]+", rb'"', rb"\[", rb"\{",
        rb"[^ \t\r\n][\x00-\xff]*",
    )
)  # fmt: skip
"""In order of how soon they complete the output; of equal ones the longest token. A comma comes after alternatives without
one."""
_RANKS_IN_STRING = (_CLOSES_STRING, re.compile(rb"[A-Za-z0-9 ]*[A-Za-z0-9][A-Za-z0-9 ]*"), re.compile(rb"[^\\][\x00-\xff]*"))


@dataclass(frozen=True, slots=True)
class Ending:
    """Tokens that complete an output; num_texts: number of strings that begin in them, including keys."""

    tokens: tuple[int, ...]
    num_texts: int


class ShortestCompletions:
    """The tokens of a vocabulary, ranked by how soon they complete JSON."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._special = SpecialTexts.of(vocabulary)
        self._text: TextPlaces | None = None
        self._forms = NO_FORMS
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
        self.scores = (outside, inside, inside)
        outside_order, inside_order = (np.argsort(scores, kind="stable") for scores in (outside, inside))
        self._orders = (outside_order, inside_order, inside_order)
        self.kinds = np.array([_kind(token) for token in self._tokens], dtype=np.int8)
        self._punctuation = {token: token_id for token_id, token in enumerate(self._tokens) if _PUNCTUATION.fullmatch(token)}
        self._bytes = {token[0]: token_id for token_id, token in enumerate(self._tokens) if len(token) == 1}
        self._closing = (_pack(closes_item), _pack(closes_string))

    def behind(self, text: ReasoningPrefix, forms: StringForms = NO_FORMS) -> ShortestCompletions:
        """Return the completions of outputs whose JSON follows a text.

        forms  of the strings in it
        """
        found = copy(self)
        found._forms = forms
        if text.closes:
            found._text = TextPlaces(text, self._vocabulary, self._special)
        return found

    @property
    def start(self) -> int:
        """The state at the beginning of an output."""
        return OUTSIDE if self._text is None else self._text.start

    def after(self, place: int, token_id: int) -> int:
        """Return the state after one more token."""
        token = self._tokens[token_id] if token_id < len(self._tokens) else b""
        if self._text is not None and place >= FIRST_TEXT_PLACE:
            following, token = self._text.after(place, token_id)
            if following is not None:
                return following
            place = OUTSIDE
        return _after_bytes(place, token)

    @property
    def has_forms(self) -> bool:
        """Whether any string has constraints."""
        return bool(self._forms)

    def open_string(self, token_ids: Sequence[int], places: Sequence[int]) -> bytes:
        """Return the open string at the end of an output, in its JSON spelling; empty if there is none.

        places  the states before each token, and after the last one
        """
        if not self.has_forms or not places or places[-1] not in (IN_STRING, AFTER_BACKSLASH):
            return b""
        first = next((at for at in range(len(places) - 1, -1, -1) if places[at] not in (IN_STRING, AFTER_BACKSLASH)), 0)
        found = b""
        for at in range(first, len(token_ids)):
            found = self.open_after(places[at], found, token_ids[at])
        return found

    def open_after(self, place: int, opened: bytes, token_id: int) -> bytes:
        """Return the open string after one more token, like open_string; empty without forms."""
        if not self.has_forms:
            return b""
        token = self._tokens[token_id] if token_id < len(self._tokens) else b""
        if place >= FIRST_TEXT_PLACE:
            place, token = OUTSIDE, b"" if self._text is None else self._text.after(place, token_id)[1]
        return _open_after(place, opened, token)

    def completions(self, opened: bytes) -> Iterator[tuple[int, ...]]:
        """Yield token sequences that complete an open string so that it has one of the forms, the shortest first."""
        try:
            text = json.loads(b'"' + opened + b'"', strict=False) if self._forms else None
        except ValueError:  # within a character, or an escape
            return
        for completion in () if text is None else self._forms.completions(text):
            tokens = self._spell(json.dumps(completion, ensure_ascii=False)[1:-1])
            if tokens:
                yield tokens

    def may_close(self, words: Any) -> bool:
        """Return whether a mask within a string allows a token that closes it."""
        return bool((words[: self.num_words] & self._closing[IN_STRING][: len(words)]).any())

    @property
    def quote(self) -> tuple[int, ...]:
        """The token of a quotation mark; () if there is none."""
        found = self._punctuation.get(b'"')
        return () if found is None else (found,)

    def _spell(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, () if it cannot be spelled."""
        encoded = tuple(self._vocabulary.encode(text))
        if b"".join(self._tokens[token_id] for token_id in encoded) == text.encode():
            return encoded
        found = tuple(self._bytes.get(byte, -1) for byte in text.encode())
        return () if -1 in found else found

    def closings(self, place: int) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences that end the text before the JSON, () if the output is not in that text."""
        return () if self._text is None or place < FIRST_TEXT_PLACE else self._text.closings(place)

    def num_leaving(self, token_ids: tuple[int, ...], place: int) -> int:
        """Return how many of these tokens are needed to leave the text before the JSON, 0 if the output is not in it."""
        count = 0
        while count < len(token_ids) and self.closings(place):
            place = self.after(place, token_ids[count])
            count += 1
        return count

    def closing_mask(self, place: int) -> Any:
        """Return the tokens that close what is open, numpy [num_mask_words] i32; None if no single token does."""
        return self._closing[place] if place in (OUTSIDE, IN_STRING) else None

    def rest(self, token_ids: tuple[int, ...], place: int) -> Ending:
        """Return these tokens as an Ending for an output in the state `place`."""
        num_texts = 0
        for token_id in token_ids:
            following = self.after(place, token_id)
            num_texts += place == OUTSIDE and following == IN_STRING
            place = following
        return Ending(token_ids, num_texts)

    def find(self, matcher: MaskedMatcher, place: int, limit: int, opened: bytes = b"") -> Ending | None:
        """Return a completion of an output in the state `place`; None if none is found within `limit` tokens.

        opened  the string that is open there, see open_string
        """
        return Search(self, matcher, place, limit, opened).result()

    def find_further(self, matcher: MaskedMatcher, place: int, limit: int) -> Ending | None:
        """Return how a complete output could continue to another end; None if nothing is found within `limit` tokens."""
        fork, words = matcher.fork_ahead(), np.zeros((1, self.num_words), dtype=np.int32)
        if fill_mask(fork, words[0]) is not None:
            return None
        words[0].view(np.uint32)[matcher.end_token_id // 32] &= ~np.uint32(1 << matcher.end_token_id % 32)
        token_id = self.choose(words, place, set())
        if token_id is None or fork.advance(token_id) is not None:
            return None
        found = self.find(fork, self.after(place, token_id), limit - 1, self.open_after(place, b"", token_id))
        return None if found is None else self.rest((token_id, *found.tokens), place)

    def fits(self, ending: tuple[int, ...], matcher: MaskedMatcher) -> bool:
        """Return whether tokens complete an output."""
        return matcher.num_fitting((*ending, matcher.end_token_id)) == len(ending) + 1

    def fitting_part(self, ending: tuple[int, ...], matcher: MaskedMatcher, limit: int) -> tuple[int, ...] | None:
        """Return the shortest suffix of a completion that completes an output which has continued since; None: no suffix does.

        It may begin with a part of a token: an output writes `"` and then `:` where the completion has one token for both.

        limit  maximum number of tokens of the suffix
        """
        if matcher.can_end:
            return ()
        is_next: dict[int, bool] = {}
        for start in range(len(ending) - 1, max(-1, len(ending) - 1 - limit), -1):
            for first in (*self._pieces(ending[start]), ending[start]):
                if not is_next.get(first, True):
                    continue
                part = (first, *ending[start + 1 :])
                num_fitting = matcher.num_fitting((*part, matcher.end_token_id)) or 0
                is_next[first] = num_fitting > 0
                if num_fitting > len(part):
                    return part
        return None

    def _pieces(self, token_id: int) -> list[int]:
        """Return the punctuation tokens that are suffixes of a token."""
        token = self._tokens[token_id]
        ends = (token[start:] for start in range(1, len(token)))
        return [self._punctuation[end] for end in ends if end in self._punctuation]

    def choose(self, words: Any, place: int, tried: set[int]) -> int | None:
        """Return the best token that a mask allows; if possible not of a kind that was tried at this mask.

        A repeated mask shows that the previous choice was a dead end, for example digits where a slash must come. Closing
        brackets are exempt, also where several objects are closed one after the other.
        """
        mask = words[0].view(np.uint32)
        token_id = self._best(mask, place, ())
        if token_id is not None and place == OUTSIDE and self.scores[OUTSIDE][token_id] <= _MAX_LENGTH:
            return token_id
        token_id = self._best(mask, place, tried) if tried else token_id
        token_id = self._best(mask, place, ()) if token_id is None else token_id
        if token_id is not None:
            tried.add(int(self.kinds[token_id]))
        return token_id

    def _best(self, mask: Any, place: int, tried: Collection[int]) -> int | None:
        """Return the allowed token that ranks first in this state, excluding the kinds that were tried."""
        place = OUTSIDE if place >= FIRST_TEXT_PLACE else place
        filled = np.flatnonzero(mask)
        if len(filled) <= _FEW_WORDS:
            bits = np.unpackbits(mask[filled].view(np.uint8), bitorder="little").reshape(len(filled), 32)
            rows, columns = np.nonzero(bits)
            allowed = filled[rows] * 32 + columns
            allowed = self._untried(allowed[allowed < len(self._tokens)], tried)
            return int(allowed[np.argmin(self.scores[place][allowed])]) if len(allowed) else None
        order = self._orders[place]
        for part in (order[:_FIRST_TOKENS], order[_FIRST_TOKENS:]):
            allowed = self._untried(part[mask[part // 32] >> (part % 32).astype(np.uint32) & 1 == 1], tried)
            if len(allowed):
                return int(allowed[0])
        return None

    def _untried(self, token_ids: Any, tried: Collection[int]) -> Any:
        return token_ids[~np.isin(self.kinds[token_ids], list(tried))] if tried else token_ids


class Search:
    """A search for a completion from a matcher's current state; later changes of the matcher do not affect it.

    Thread-safe: the forks of a matcher share it.

    limit   maximum number of tokens of the completion
    opened  the string that is open, see ShortestCompletions.open_string
    """

    __slots__ = (
        "_endings",
        "_has_found",
        "_is_done",
        "_limit",
        "_lock",
        "_matcher",
        "_num_completed",
        "_num_masks",
        "_num_texts",
        "_opened",
        "_place",
        "_tokens",
        "_tried",
        "_words",
    )

    def __init__(
        self, endings: ShortestCompletions, matcher: MaskedMatcher, place: int, limit: int, opened: bytes = b""
    ) -> None:
        self._endings = endings
        self._matcher = matcher.fork_ahead()
        self._place = place
        self._limit = limit
        self._words = np.zeros((1, matcher.end_token_id // 32 + 1), dtype=np.int32)
        self._tried: dict[bytes, set[int]] = {}
        self._tokens: list[int] = []
        self._num_texts = 0
        self._num_masks = 0
        self._num_completed = 0  # number of attempts to complete this string
        self._opened = opened
        self._is_done = self._has_found = self._matcher.can_end
        self._lock = threading.Lock()

    def is_known(self, max_masks: int) -> bool:
        """Continue until max_masks masks are filled in total; return whether the result is known with at most that many."""
        with self._lock:
            while not self._is_done and self._num_masks < max_masks:
                self._go_on()
            return self._is_done and self._num_masks <= max_masks

    def result(self) -> Ending | None:
        """Finish the search and return the result."""
        self.is_known(MAX_MASKS)
        return Ending(tuple(self._tokens), self._num_texts) if self._has_found else None

    def _go_on(self) -> None:
        """Fill one mask, take the best token, and the tokens that are forced before the next mask."""
        self._num_masks += 1
        forced = self._matcher.forced_tokens()
        while forced and self._take(forced):
            forced = self._matcher.forced_tokens()
        for closing in () if self._is_done else self._endings.closings(self._place):
            if self._matcher.num_fitting(closing) == len(closing):
                self._take(closing)
                return
        if self._is_done or fill_mask(self._matcher, self._words[0]) is not None:
            self._is_done = True
            return
        if self._complete_string():
            return
        token_id = self._endings.choose(self._words, self._place, self._tried.setdefault(self._words.tobytes(), set()))
        if token_id is None:
            self._is_done = True
        else:
            self._take((token_id,))

    def _complete_string(self) -> bool:
        """Take tokens that complete a string which cannot be closed yet; return False if there are none."""
        if self._place != IN_STRING or self._num_completed >= _MAX_COMPLETED or self._endings.may_close(self._words[0]):
            return False
        self._num_completed += 1
        for tokens in self._endings.completions(self._opened):
            whole = (*tokens, *self._endings.quote)
            if self._matcher.num_fitting(whole) == len(whole):
                self._take(tokens)
                return True
        return False

    def _take(self, token_ids: Sequence[int]) -> bool:
        """Advance by some tokens; return False and finish at an end, or if there are too many."""
        place = self._place
        is_fine = len(self._tokens) + len(token_ids) <= self._limit
        for token_id in token_ids if is_fine else ():
            is_fine = is_fine and self._matcher.advance(token_id) is None
            following = self._endings.after(self._place, token_id)
            self._opened = self._endings.open_after(self._place, self._opened, token_id)
            self._num_texts += self._place == OUTSIDE and following == IN_STRING
            self._place = following
            self._tokens.append(token_id)
        if (self._place == OUTSIDE) != (place == OUTSIDE):
            self._tried.clear()
            self._num_completed = 0
        self._has_found = is_fine and self._matcher.can_end
        self._is_done = self._has_found or not is_fine
        return not self._is_done


def _after_bytes(place: int, token: bytes) -> int:
    """Return the lexical state after some bytes."""
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


def _open_after(place: int, opened: bytes, token: bytes) -> bytes:
    """Return the open string after some bytes, b"" if there is none."""
    begin = 0
    for at, byte in enumerate(token):
        following = _after_bytes(place, token[at : at + 1])
        if byte == 0x22 and (place == OUTSIDE) != (following == OUTSIDE):
            opened, begin = b"", at + 1
        place = following
    return b"" if place == OUTSIDE else opened + token[begin:]


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
