"""RegexAutomaton: decides which texts match a regular expression, and how a text can be completed to match in few characters.

Token masks do not show that: if a pattern may match anywhere in a string, nearly every token is allowed all the time, and none
shows the distance from a match.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, pairwise
from typing import Any

from quire.grammar import regex_syntax as syntax
from quire.grammar.regex_syntax import Ranges, UnreadablePatternError, read_pattern

MAX_STATES = 8000
_MAX_VISITS = 2000
"""Maximum number of state sets visited in one search."""
_MAX_CACHED = 50_000
_NEVER = 1 << 30

States = frozenset[int]


@lru_cache(maxsize=512)
def automaton_of(pattern: str) -> RegexAutomaton | None:
    """Return the automaton of an expression that is searched for in a text; None if it is not supported or too large."""
    try:
        return RegexAutomaton(read_pattern(pattern))
    except UnreadablePatternError:
        return None


class RegexAutomaton:
    """A nondeterministic automaton (Thompson, 1968), simulated by sets of states. Raises UnreadablePatternError.

    It reads a text from its beginning; the expression may match anywhere in it, except for its anchors.
    """

    def __init__(self, node: syntax.Node) -> None:
        self._empty: list[list[int]] = []  # epsilon edges
        self._begin: list[list[int]] = []  # epsilon edges at the beginning of a text
        self._end: list[list[int]] = []  # and at its end
        self._chars: list[list[tuple[Ranges, int]]] = []
        first, self._last = self._state(), self._state()
        self._chars[first].append((syntax.ANY, first))
        self._chars[self._last].append((syntax.ANY, self._last))
        entry, leave = self._add(node)
        self._empty[first].append(entry)
        self._empty[leave].append(self._last)
        self.start = self._closure((first,), (self._empty, self._begin))
        self._distances = self._measure()
        self._steps: dict[tuple[States, int], States] = {}

    def read(self, text: str) -> States:
        """Return the states after a text; empty if no text with this prefix can match."""
        states = self.start
        for character in text:
            if not states:
                break
            states = self.step(states, ord(character))
        return states if self.distance(states) < _NEVER else frozenset()

    def step(self, states: States, code_point: int) -> States:
        """Return the states after one more character."""
        key = (states, code_point)
        found = self._steps.get(key)
        if found is None:
            targets = [target for state in states for ranges, target in self._chars[state] if _holds(ranges, code_point)]
            if len(self._steps) >= _MAX_CACHED:
                self._steps.clear()
            found = self._steps[key] = self._closure(targets, (self._empty,))
        return found

    def distance(self, states: States) -> int:
        """Return the minimum number of characters until a text matches."""
        return min((self._distances[state] for state in states), default=_NEVER)

    def ranges_from(self, states: States) -> list[tuple[int, int]]:
        """Return the ranges of characters that can come next."""
        return [pair for state in states for ranges, _ in self._chars[state] for pair in ranges]

    @property
    def num_states(self) -> int:
        """Number of states."""
        return len(self._empty)

    def is_within(self, texts: Collection[str]) -> bool:
        """Return whether it matches only texts in `texts`, if that can be determined quickly."""
        tree: dict[str, Any] = {}
        for text in texts:
            node = tree
            for character in text:
                node = node.setdefault(character, {})
            node[""] = {}
        waiting = [(tree, self.start)]
        for _ in range(_MAX_VISITS):
            if not waiting:
                return True
            node, states = waiting.pop()
            following = self._known_steps(node, states)
            if following is None:
                return False
            waiting += following
        return False

    def _known_steps(self, node: dict[str, Any], states: States) -> list[tuple[dict[str, Any], States]] | None:
        """Return the continuations of known texts with this prefix, node by node; None if other texts match, too."""
        if self.distance(states) == 0 and "" not in node:
            return None
        found: list[tuple[dict[str, Any], States]] = []
        following = {ord(character): inner for character, inner in node.items() if character}
        for low, high in _intervals(self.ranges_from(states)):
            known = [code_point for code_point in following if low <= code_point <= high]
            if len(known) <= high - low and self.distance(self.step(states, _unknown(low, high, following))) < _NEVER:
                return None
            stepped = ((following[one], self.step(states, one)) for one in known)
            found += [(inner, at) for inner, at in stepped if self.distance(at) < _NEVER]
        return found

    def _state(self) -> int:
        if len(self._empty) >= MAX_STATES:
            raise UnreadablePatternError("it has too many states")
        for edges in (self._empty, self._begin, self._end, self._chars):
            edges.append([])
        return len(self._empty) - 1

    def _add(self, node: syntax.Node) -> tuple[int, int]:
        """Add the states of a node; return the first and the last one."""
        first, last = self._state(), self._state()
        if isinstance(node, syntax.Chars):
            self._chars[first].append((node.ranges, last))
        elif isinstance(node, syntax.Anchor):
            (self._begin if node.side == "begin" else self._end)[first].append(last)
        elif isinstance(node, syntax.Choice):
            for part in node.parts:
                entry, leave = self._add(part)
                self._empty[first].append(entry)
                self._empty[leave].append(last)
        elif isinstance(node, syntax.Sequence):
            self._empty[self._chain(first, node.parts)].append(last)
        else:
            self._add_repeat(node, first, last)
        return first, last

    def _chain(self, state: int, parts: Sequence[syntax.Node]) -> int:
        for part in parts:
            entry, leave = self._add(part)
            self._empty[state].append(entry)
            state = leave
        return state

    def _add_repeat(self, node: syntax.Repeat, first: int, last: int) -> None:
        state = self._chain(first, [node.part] * node.least)
        if node.most is None:
            entry, leave = self._add(node.part)
            self._empty[state] += (entry, last)
            self._empty[leave] += (entry, last)
            return
        self._empty[state].append(last)
        for _ in range(node.most - node.least):
            state = self._chain(state, [node.part])
            self._empty[state].append(last)

    def _closure(self, states: Sequence[int], kinds: tuple[list[list[int]], ...]) -> States:
        found, waiting = set(states), list(states)
        while waiting:
            state = waiting.pop()
            for edges in kinds:
                waiting += (new := [target for target in edges[state] if target not in found])
                found.update(new)
        return frozenset(found)

    def _measure(self) -> list[int]:
        """Return the distance of every state from a match, by edges that can be used after the beginning of a text."""
        size = len(self._empty)
        back: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        for state in range(size):
            for target in self._empty[state]:
                back[target].append((0, state))
            for ranges, target in self._chars[state]:
                if ranges:
                    back[target].append((1, state))
        distances = [_NEVER] * size
        ending = self._reverse_closure()
        heap = [(0, state) for state in ending]
        for state in ending:
            distances[state] = 0
        while heap:
            distance, state = heapq.heappop(heap)
            if distance > distances[state]:
                continue
            for weight, source in back[state]:
                if distance + weight < distances[source]:
                    distances[source] = distance + weight
                    heapq.heappush(heap, (distance + weight, source))
        return distances

    def _reverse_closure(self) -> States:
        """Return the states in which a text that ends there matches."""
        back: list[list[int]] = [[] for _ in self._empty]
        for edges in (self._empty, self._end):
            for state, targets in enumerate(edges):
                for target in targets:
                    back[target].append(state)
        return self._closure((self._last,), (back,))


@dataclass(slots=True)
class Effort:
    """Number of states that may still be visited, over several searches."""

    left: int


def shortest_completion(
    automata: Sequence[RegexAutomaton], text: str, effort: Effort, least: int = 0, most: int | None = None
) -> str | None:
    """Return a completion of a text with which all expressions match (A*); None if none is found.

    least, most  number of characters of the whole text
    """
    effort.left -= len(text) * len(automata)
    start = tuple(automaton.read(text) for automaton in automata) if effort.left > 0 else ()
    if not start or not all(start):
        return None
    room = (least - len(text), _NEVER if most is None else most - len(text))
    order = count()
    heap = [(_bound(automata, start, room, 0), 0, next(order), "", start)]
    seen: dict[tuple[States, ...], int] = {}
    while heap and effort.left > 0:
        total, _, _, found, states = heapq.heappop(heap)
        if total == len(found) or total >= _NEVER:
            return found if total < _NEVER else None
        if seen.get(states, -1) >= (length := min(len(found), max(0, room[0]))):
            continue
        seen[states] = length
        for code_point in _representatives(automata, states):
            effort.left -= sum(map(len, states))
            following = tuple(one.step(at, code_point) for one, at in zip(automata, states, strict=True))
            total = _bound(automata, following, room, len(found) + 1)
            if total < _NEVER:
                heapq.heappush(heap, (total, -len(found), next(order), found + chr(code_point), following))
    return None


def _bound(automata: Sequence[RegexAutomaton], states: tuple[States, ...], room: tuple[int, int], length: int) -> int:
    """Return the minimum length of a completion through some states, _NEVER if there is no room for it."""
    ahead = max(one.distance(at) for one, at in zip(automata, states, strict=True))
    total = max(length + ahead, room[0])
    return total if total <= room[1] and ahead < _NEVER else _NEVER


def _representatives(automata: Sequence[RegexAutomaton], states: tuple[States, ...]) -> list[int]:
    """Return one character of each class that the automata distinguish, common ones first."""
    ranges = [pair for one, at in zip(automata, states, strict=True) for pair in one.ranges_from(at)]
    found = [_common(low, high) for low, high in _intervals(ranges)]
    return sorted((one for one in found if one is not None), key=_rarity)


def _common(low: int, high: int) -> int | None:
    """Return a common character of a range; None if it contains only surrogates."""
    for first, last in ((0x61, 0x7A), (0x30, 0x39), (0x41, 0x5A), (0x20, 0x7E), (0xA1, 0xD7FF), (0xE000, 0x10FFFF), (0, 0x1F)):
        if max(low, first) <= min(high, last):
            return max(low, first)
    return low if low == high and not 0xD800 <= low <= 0xDFFF else None


def _rarity(code_point: int) -> int:
    """Return 0 for letters and digits, 1 for other characters that JSON does not escape, 2 for those that it does."""
    character = chr(code_point)
    return 0 if character.isascii() and character.isalnum() else 2 if code_point < 0x20 or character in '"\\' else 1


def _intervals(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return disjoint intervals, in order, that do not cross the border of any range; `"` and the backslash are separate."""
    cuts = {low for low, _ in ranges} | {high + 1 for _, high in ranges}
    cuts |= {special for special in (0x20, 0x22, 0x23, 0x5C, 0x5D) if any(low <= special <= high for low, high in ranges)}
    points = sorted(cuts)
    merged = syntax.merge(ranges)
    return [(low, high - 1) for low, high in pairwise(points) if _holds(merged, low)]


def _unknown(low: int, high: int, known: Collection[int]) -> int:
    return next(code_point for code_point in range(low, high + 1) if code_point not in known)


def _holds(ranges: Ranges, code_point: int) -> bool:
    at = bisect_right(ranges, (code_point, _NEVER)) - 1
    return at >= 0 and ranges[at][1] >= code_point
