"""LengthBoundedGrammar: a grammar of JSON whose outputs are completed within a maximum number of tokens.

While there is room, nothing is changed. From time to time the matcher searches for the shortest completion that it can find.
When hardly more tokens are left, open parts are closed and optional parts are omitted, and finally only that completion is
allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from quire.contracts.constraint import Grammar
from quire.grammar.matcher import MaskedMatcher, WrappingMatcher
from quire.grammar.shortest_completion import MAX_MASKS, Ending, Search, ShortestCompletions

_TEXT_TOKENS = 6
"""Tokens reserved for each string that is still to come."""
_SPARE_TOKENS = 4
_ANSWER_TOKENS = 32
"""Tokens that free text before the JSON leaves for it in addition, at most an eighth of all."""
_MAX_PATIENCE = 64
_MAX_ENDING = 256
"""Maximum length of a completion that is searched for, and number of tokens before the limit at which the search begins;
outputs that need more are not bounded."""
_MAX_RETREAT = 128
"""Number of tokens after which results for discarded continuations are dropped."""
_MASKS_A_TOKEN = 8
"""Masks per token of a search that can wait; it can while _MIN_ROOM tokens are left,
fewer if no completion was found before."""
_MIN_ROOM = 128
_MAX_FAILURES = 3
"""Number of failed searches after which the output is no longer bounded."""


@dataclass(frozen=True, slots=True)
class _Look:
    """The decision after `count` tokens, valid until after `until` tokens.

    forced        tokens to take, a completion or the way out of the text before the JSON; None: nothing yet
    ending        the completion that was found, forced or not
    search        a search for a completion that starts after `first` tokens and continues with later tokens
    num_failures  number of consecutive searches without a result
    least, peak   length of the shortest completion found so far, and of the longest one after a shorter one: for example what
                  completing another item of a list or a map takes
    """

    count: int
    until: int
    is_closing: bool = False
    forced: tuple[int, ...] | None = None
    ending: tuple[int, ...] = ()
    search: Search | None = None
    first: int = 0
    num_failures: int = 0
    least: int = _MAX_ENDING
    peak: int = 0


class _Step:
    """State of the output after a token: its place in JSON, the decision made there, and the following steps."""

    __slots__ = ("following", "found", "place")

    def __init__(self, place: int) -> None:
        self.place = place
        self.found: _Look | None = None
        self.following: dict[int, _Step] = {}


class LengthBoundedGrammar:
    """See contracts.constraint.Grammar.

    max_tokens  of an output; one that ends earlier anyway is not changed
    """

    def __init__(self, grammar: Grammar, endings: ShortestCompletions, max_tokens: int) -> None:
        self._grammar = grammar
        self._endings = endings
        self._max_tokens = max_tokens

    def new_matcher(self) -> LengthBoundedMatcher:
        """See Grammar."""
        return LengthBoundedMatcher(cast("MaskedMatcher", self._grammar.new_matcher()), self._endings, self._max_tokens)


class LengthBoundedMatcher(WrappingMatcher):
    """See MaskedMatcher. Its behaviour is a function of the tokens, also after `retreat`.

    Results that were found after drafts, in other threads, are kept until those tokens become part of the output.
    """

    __slots__ = ("_endings", "_looks", "_max_tokens", "_steps", "_tokens")

    def __init__(self, inner: MaskedMatcher, endings: ShortestCompletions, max_tokens: int) -> None:
        super().__init__(inner)
        self._endings = endings
        self._max_tokens = max_tokens
        self._steps = [_Step(endings.start)]
        self._tokens: list[int] = []
        self._looks = [_Look(-1, max(0, max_tokens - _MAX_ENDING))]

    @property
    def _count(self) -> int:
        return len(self._tokens)

    def _look(self) -> _Look:
        """Return the current decision, after a search if one is due."""
        last = self._looks[-1]
        if self._count < last.until and not self._has_come_to_an_end(last):
            return last
        step = self._steps[-1]
        if step.found is None:
            step.found = self._search(last)
        self._looks.append(step.found)
        return step.found

    def _has_come_to_an_end(self, last: _Look) -> bool:
        return 0 <= last.count < self._count and not last.is_closing and self.inner.can_end

    def _search(self, last: _Look) -> _Look:
        """Return the decision based on a completion: the last one, if it is still valid, or else one that is searched for.

        While there is room, the search is spread over the next tokens, so that no step waits long for it.
        """
        if self.inner.can_end:
            return self._search_further()
        known = self._known_ending(last)
        if known is not None:
            return self._judge(known, last)
        count, num_left = self._count, self._max_tokens - self._count
        min_room = _MIN_ROOM // 4 if last.num_failures else max(_MIN_ROOM, 2 * len(last.ending))
        if last.is_closing or num_left < min_room:
            return self._judge_found(self._find(), last)
        search, first = last.search, last.first
        if search is None:
            limit, first = min(num_left, _MAX_ENDING), count
            search = Search(self._endings, self.inner, self._steps[-1].place, limit, self._open_string())
        num_masks = min(MAX_MASKS, (count - first + 1) * _MASKS_A_TOKEN)
        if not search.is_known(num_masks) and num_masks < MAX_MASKS:
            return replace(last, count=count, until=count + 1, ending=(), search=search, first=first)
        found = self._judge_found(search.result(), last)
        # The completion of an output some tokens ago shows how much room there is, but may not complete the current output.
        return self._judge_found(self._find(), last) if found.is_closing and first < count else found

    def _search_further(self) -> _Look:
        """Decide whether a complete output may continue, for example with another call: only if that can be completed too."""
        count, num_left = self._count, self._max_tokens - self._count
        further = self._endings.find_further(self.inner, self._steps[-1].place, min(num_left, _MAX_ENDING))
        if further is None or num_left <= len(further.tokens) + _SPARE_TOKENS + _TEXT_TOKENS * further.num_texts:
            return _Look(count, self._max_tokens + 1, True, ())
        return _Look(count, count + 1)

    def _find(self) -> Ending | None:
        limit = min(self._max_tokens - self._count, _MAX_ENDING)
        return self._endings.find(self.inner, self._steps[-1].place, limit, self._open_string())

    def _open_string(self) -> bytes:
        if not self._endings.has_forms:
            return b""
        return self._endings.open_string(self._tokens, [step.place for step in self._steps])

    def _known_ending(self, last: _Look) -> Ending | None:
        """Return the rest of the last completion if the output followed it, or a part of it that still fits.

        If the output deviated, the later part of the completion usually still completes it.
        """
        if not last.ending:
            return None
        num_taken, place = self._count - last.count, self._steps[-1].place
        if self._endings.closings(place):  # any part fits in free text, and does not end it
            return self._endings.rest(last.ending, place) if self._endings.fits(last.ending, self.inner) else None
        if last.ending[:num_taken] == tuple(self._tokens[last.count :]) and len(last.ending) > num_taken:
            return self._endings.rest(last.ending[num_taken:], place)
        part = self._endings.fitting_part(last.ending, self.inner, self._max_tokens - self._count)
        return None if part is None else self._endings.rest(part, place)

    def _judge_found(self, ending: Ending | None, last: _Look) -> _Look:
        count, num_left = self._count, self._max_tokens - self._count
        if ending is not None:
            return self._judge(ending, last)
        if last.num_failures + 1 == _MAX_FAILURES:
            return _Look(count, self._max_tokens)
        until = count + max(8, num_left // 4)
        return _Look(count, until, num_failures=last.num_failures + 1, least=last.least, peak=last.peak)

    def _judge(self, ending: Ending, last: _Look) -> _Look:
        size = len(ending.tokens)
        found = self._judge_alone(ending)
        found = replace(found, least=min(last.least, size), peak=max(last.peak, size) if size > last.least else last.peak)
        if found.forced is not None or found.peak <= size:
            return found
        room = self._max_tokens - self._count - found.peak - _SPARE_TOKENS
        if room <= 0:  # what is begun now might not be completed
            return replace(found, until=self._count + 1, is_closing=True)
        return replace(found, until=min(found.until, self._count + room))

    def _judge_alone(self, ending: Ending) -> _Look:
        """Return the decision for a completion, regardless of previous ones."""
        count = self._count
        spare = self._max_tokens - count - len(ending.tokens)
        if spare <= _SPARE_TOKENS:
            return _Look(count, self._max_tokens + 1, True, ending.tokens, ending.tokens)
        spare -= _SPARE_TOKENS + min(_TEXT_TOKENS * ending.num_texts, self._max_tokens // 4)
        num_leaving = self._endings.num_leaving(ending.tokens, self._steps[-1].place)
        if num_leaving:
            spare -= min(_ANSWER_TOKENS, self._max_tokens // 8)
            if spare <= 0:
                return _Look(count, count + num_leaving, False, ending.tokens[:num_leaving], ending.tokens)
        if spare <= 0:
            return _Look(count, count + 1, True, ending=ending.tokens)
        return _Look(count, count + min(_MAX_PATIENCE, max(1, spare // 3)), ending=ending.tokens)

    def restrict(self, words: Any) -> None:
        """See MaskedMatcher."""
        self.inner.restrict(words)
        look = self._look()
        if look.forced is not None:
            ahead = look.forced[self._count - look.count :]
            if ahead:
                words[:] = 0
                words.view(np.uint32)[ahead[0] // 32] = np.uint32(1 << ahead[0] % 32)
        elif look.is_closing:
            closing = self._endings.closing_mask(self._steps[-1].place)
            if closing is not None:
                left = words[: len(closing)] & closing
                if left.any():
                    words[: len(closing)] = left

    def advance(self, token_id: int) -> str | None:
        """See GrammarMatcher."""
        self._look()
        error = self.inner.advance(token_id)
        if error is None:
            step = self._steps[-1]
            following = step.following.get(token_id)  # forks in other threads may remove it at any time
            if following is None:
                following = step.following[token_id] = _Step(self._endings.after(step.place, token_id))
            self._steps.append(following)
            self._tokens.append(token_id)
            if len(self._steps) > _MAX_RETREAT:
                self._steps[-_MAX_RETREAT].following.clear()
        return error

    def retreat(self, num_tokens: int) -> str | None:
        """See GrammarMatcher."""
        error = self.inner.retreat(num_tokens)
        if error is None:
            del self._steps[len(self._steps) - num_tokens :]
            del self._tokens[len(self._tokens) - num_tokens :]
            while self._looks[-1].count > self._count:
                self._looks.pop()
        return error

    def num_fitting(self, token_ids: Sequence[int]) -> int | None:
        """See GrammarMatcher. Pending decisions are ignored: masks are filled after drafts."""
        count = super().num_fitting(token_ids)
        last = self._looks[-1]
        if count is None:
            return None
        if last.forced is None:
            return 0 if last.is_closing else count
        ahead = last.forced[self._count - last.count :]
        pairs = zip(token_ids[:count], ahead, strict=False)
        return next((index for index, (one, other) in enumerate(pairs) if one != other), min(count, len(ahead)))

    def forced_tokens(self) -> Sequence[int]:
        """See GrammarMatcher. Only as far as a decision was made."""
        last = self._looks[-1]
        if last.forced is not None:
            return last.forced[self._count - last.count :]
        return () if last.is_closing else self.inner.forced_tokens()[: max(0, last.until - self._count)]

    def fork(self) -> LengthBoundedMatcher:
        """See GrammarMatcher."""
        other = LengthBoundedMatcher(self.inner.fork(), self._endings, self._max_tokens)
        other._steps, other._tokens, other._looks = list(self._steps), list(self._tokens), list(self._looks)
        return other

    def fork_ahead(self) -> LengthBoundedMatcher:
        """See MaskedMatcher."""
        return self.fork()

    @property
    def is_complete(self) -> bool:
        """See GrammarMatcher."""
        return super().is_complete or (self.inner.can_end and self._look().is_closing)
