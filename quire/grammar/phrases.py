"""BannedPhrases: which tokens would spell a banned phrase, whatever tokens it is cut into.

A phrase is matched in the bytes of the output (Aho and Corasick, 1975), so that it makes no difference where one token ends and
the next begins. The state after an output is the longest end of it with which a phrase begins; the tokens that are forbidden
depend on nothing else.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from quire.grammar.errors import GrammarError
from quire.grammar.vocabulary import Vocabulary

MAX_PHRASE_BYTES = 64 << 10
_MAX_CACHED_STATES = 512


class TokenIndex:
    """The tokens of a vocabulary by what they begin with, and by what they contain."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        texts = [
            (token, token_id)
            for token_id, token in enumerate(vocabulary.tokens)
            if token and token_id not in vocabulary.special_token_ids
        ]
        texts.sort()
        self._texts = [token for token, _ in texts]
        self._ids = np.array([token_id for _, token_id in texts], dtype=np.int64)
        self._joined = b"".join(self._texts)
        self._ends = np.array(list(accumulate(map(len, self._texts))), dtype=np.int64)

    def beginning_with(self, prefix: bytes) -> Any:
        """Return the ids of the tokens that begin with some bytes, numpy [N] i64."""
        first = bisect_left(self._texts, prefix)
        above = _successor(prefix)
        last = len(self._texts) if above is None else bisect_left(self._texts, above, lo=first)
        return self._ids[first:last]

    def containing(self, part: bytes) -> Any:
        """Return the ids of the tokens that contain some bytes, numpy [N] i64."""
        starts: list[int] = []
        at = self._joined.find(part)
        while at >= 0:
            starts.append(at)
            at = self._joined.find(part, at + 1)
        begins = np.array(starts, dtype=np.int64)
        owners = np.searchsorted(self._ends, begins, side="right")
        return self._ids[np.unique(owners[begins + len(part) <= self._ends[owners]])] if starts else self._ids[:0]


def _successor(prefix: bytes) -> bytes | None:
    """Return the least bytes above all that begin with the prefix."""
    bare = prefix.rstrip(b"\xff")
    return bare[:-1] + bytes([bare[-1] + 1]) if bare else None


class BannedPhrases:
    """The states of some phrases, and their masks, each computed when it is first wanted. Thread-safe.

    phrases  none empty. Raises GrammarError where they have more than 64 KiB together
    """

    def __init__(self, phrases: Iterable[str], vocabulary: Vocabulary, index: TokenIndex) -> None:
        self._phrases = sorted({phrase.encode("utf-8", errors="surrogatepass") for phrase in phrases})
        size = sum(map(len, self._phrases))
        if size > MAX_PHRASE_BYTES:
            raise GrammarError(f"banned words may have {MAX_PHRASE_BYTES} bytes together, got {size}")
        self._tokens = vocabulary.tokens
        self._special = vocabulary.special_token_ids
        self._num_words = vocabulary.num_mask_words
        self._index = index
        self._build()
        always = self._new_mask()
        for phrase in self._phrases:
            _set_bits(always, index.containing(phrase))
        self._always = always
        self._lock = threading.Lock()
        self._masks: OrderedDict[int, Any] = OrderedDict()

    def _build(self) -> None:
        """Number the beginnings of phrases; the empty one is 0."""
        self._next: list[dict[int, int]] = [{}]
        whole: set[int] = set()
        self._ahead: list[list[tuple[int, int]]] = [[]]  # per state the phrases that begin so, and where they go on
        for index, phrase in enumerate(self._phrases):
            state = 0
            for position, byte in enumerate(phrase):
                if byte not in self._next[state]:
                    self._next[state][byte] = len(self._next)
                    self._next.append({})
                    self._ahead.append([])
                state = self._next[state][byte]
                if position + 1 < len(phrase):
                    self._ahead[state].append((index, position + 1))
                else:
                    whole.add(state)
        self._fallback = [0] * len(self._next)
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for byte, following in self._next[state].items():
                self._fallback[following] = self._step(self._fallback[state], byte)
                if self._fallback[following] in whole:
                    whole.add(following)
                waiting.append(following)
        self._whole = frozenset(whole)

    def _step(self, state: int, byte: int) -> int:
        while True:
            following = self._next[state].get(byte)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fallback[state]

    def after(self, state: int, token_id: int) -> int:
        """Return the state behind one more token; special tokens are no text."""
        if token_id >= len(self._tokens) or token_id in self._special:
            return state
        for byte in self._tokens[token_id]:
            state = self._step(state, byte)
        return state

    def through(self, state: int, text: bytes) -> int | None:
        """Return the state behind a text, None where a phrase is complete within it, which may have begun before."""
        for byte in text:
            state = self._step(state, byte)
            if state in self._whole:
                return None
        return state

    def start_behind(self, token_ids: Sequence[int]) -> int:
        """Return the state behind a prompt."""
        longest = max(map(len, self._phrases))
        num_bytes, first = 0, len(token_ids)
        while first > 0 and num_bytes < longest:
            first -= 1
            if token_ids[first] < len(self._tokens) and token_ids[first] not in self._special:
                num_bytes += len(self._tokens[token_ids[first]])
        state = 0
        for token_id in token_ids[first:]:
            state = self.after(state, token_id)
        return state

    def mask(self, state: int) -> Any:
        """Return which tokens are left, numpy [num_mask_words] i32, a bit each; not to be written."""
        with self._lock:
            found = self._masks.get(state)
            if found is not None:
                self._masks.move_to_end(state)
                return found
        found = self._always.copy()
        part = state
        while part:
            for index, position in self._ahead[part]:
                _set_bits(found, self._index.beginning_with(self._phrases[index][position:]))
            part = self._fallback[part]
        found = np.invert(found)
        with self._lock:
            self._masks[state] = found
            if len(self._masks) > _MAX_CACHED_STATES:
                self._masks.popitem(last=False)
        return found

    def forbids(self, state: int, token_id: int) -> bool:
        """Return whether a token would complete a phrase."""
        return not int(self.mask(state)[token_id // 32]) >> token_id % 32 & 1

    def _new_mask(self) -> Any:
        return np.zeros(self._num_words, dtype=np.int32)


def _set_bits(words: Any, token_ids: Any) -> None:
    bits = np.left_shift(np.uint32(1), (token_ids % 32).astype(np.uint32))
    np.bitwise_or.at(words.view(np.uint32), token_ids // 32, bits)
