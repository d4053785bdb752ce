"""Match module names against regular expressions from an untrusted checkpoint, in linear time.

A pattern becomes an automaton (Thompson, 1968) whose deterministic states are created on demand. It never backtracks; its size
is bounded, and so is the total work for all patterns of a config.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.quant.pattern_syntax import Alternatives, Chain, Chars, Edge, Node, Repeat, parse_pattern

_MAX_STATES = 1024
_MAX_NAME = 512
_MAX_VISITS = 2_000_000
"""Maximum number of visited states, about a second. Patterns of real configs need a few thousand each."""
_MAX_CHARACTERS = 100_000_000
"""Maximum number of characters matched by known states, about ten seconds: fifty patterns for the largest models."""


class MatchingBudget:
    """Limits of matching, shared by all patterns of one config, so that a large number of patterns is refused too."""

    def __init__(self) -> None:
        self.num_visits = 0
        self.num_characters = 0

    def visit(self, num_states: int, text: str) -> None:
        """Count visited states of a pattern. Raises ModelFormatError above the limit."""
        self.num_visits += num_states
        if self.num_visits > _MAX_VISITS:
            raise self._refusal(text)

    def walk(self, name: str, text: str) -> None:
        """Count the characters of a name. Raises ModelFormatError if it is too long, or above the limit."""
        if len(name) > _MAX_NAME:
            raise ModelFormatError(
                f"the checkpoint has a module name of {len(name)} characters ({name[:40]!r}...); at most {_MAX_NAME} are read "
                "where the quantisation config has patterns"
            )
        self.num_characters += len(name)
        if self.num_characters > _MAX_CHARACTERS:
            raise self._refusal(text)

    @staticmethod
    def _refusal(text: str) -> ModelFormatError:
        return ModelFormatError(
            "the patterns of the quantisation config are together too complex to match the checkpoint's module names with; "
            f"they were given up at {text[:80]!r}: simplify them or name fewer"
        )


class ModulePattern:
    """A regular expression for module names, which matches a prefix of a name.

    Supported: literals, '.', classes, groups, '|', '*', '+', '?', '{m,n}', '^', '$', \\d \\w \\s and their complements.
    The constructor raises UnsupportedError for anything else (look-around, back references, flags) and for patterns that are
    too long or too large.

    budget  shared with the other patterns of its config; None: its own
    """

    def __init__(self, text: str, budget: MatchingBudget | None = None) -> None:
        self.text = text
        self._budget = budget or MatchingBudget()
        self._chars: list[tuple[Chars, int]] = []
        self._free: list[list[int]] = []
        self._edges: dict[int, str] = {}
        start, self._accepting = self._new_state(), self._new_state()
        self._build(parse_pattern(text), start, self._accepting)
        self._numbers: dict[frozenset[int], int] = {}
        self._sets: list[frozenset[int]] = []
        self._next: list[dict[str, int]] = []
        self._ends: dict[tuple[int, str], bool] = {}
        self._first = self._number(self._close((start,), "^"))

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches a prefix of the name.

        Raises ModelFormatError if the name is too long, or the budget is exhausted.
        """
        self._budget.walk(name, self.text)
        state = self._first
        for character in name:
            if self._accepting in self._sets[state]:
                return True
            following = self._next[state].get(character)
            state = self._step(state, character) if following is None else following
            if not self._sets[state]:
                return False
        return self._ends_well(state, "$" if name else "^$")

    def _ends_well(self, state: int, edges: str) -> bool:
        """Return whether the pattern matches if the name ends in this state."""
        if (state, edges) not in self._ends:
            self._ends[state, edges] = self._accepting in self._close(self._sets[state], edges)
        return self._ends[state, edges]

    def _step(self, state: int, character: str) -> int:
        self._budget.visit(len(self._sets[state]), self.text)
        moved = []
        for member in self._sets[state]:
            chars, target = self._chars[member]
            if target >= 0 and chars.holds(character):
                moved.append(target)
        following = self._number(self._close(moved, ""))
        self._next[state][character] = following
        return following

    def _number(self, members: frozenset[int]) -> int:
        if members not in self._numbers:
            self._numbers[members] = len(self._sets)
            self._sets.append(members)
            self._next.append({})
        return self._numbers[members]

    def _close(self, members: Iterable[int], edges: str) -> frozenset[int]:
        """Return the epsilon closure of states; '^' and '$' are passed if `edges` contains them."""
        found, pending = set(), list(members)
        while pending:
            member = pending.pop()
            if member in found:
                continue
            found.add(member)
            edge = self._edges.get(member)
            if edge is None or edge in edges:
                pending += self._free[member]
        self._budget.visit(len(found), self.text)
        return frozenset(found)

    def _new_state(self) -> int:
        if len(self._free) >= _MAX_STATES:
            raise UnsupportedError(
                f"the pattern {self.text[:80]!r} of the quantisation config is too large (counts multiply); simplify it"
            )
        self._chars.append((Chars(), -1))
        self._free.append([])
        return len(self._free) - 1

    def _build(self, node: Node, start: int, stop: int) -> None:
        """Add states that lead from `start` to `stop` by matching the node."""
        if isinstance(node, Chars):
            here = self._new_state()
            self._free[start].append(here)
            self._chars[here] = (node, stop)
        elif isinstance(node, Edge):
            here = self._new_state()
            self._free[start].append(here)
            self._edges[here] = node.kind
            self._free[here].append(stop)
        elif isinstance(node, Alternatives):
            for choice in node.choices:
                self._build(choice, start, stop)
        elif isinstance(node, Chain):
            for part in node.parts:
                after = self._new_state()
                self._build(part, start, after)
                start = after
            self._free[start].append(stop)
        else:
            self._build_repeat(node, start, stop)

    def _build_repeat(self, node: Repeat, start: int, stop: int) -> None:
        for _ in range(node.minimum):
            after = self._new_state()
            self._build(node.node, start, after)
            start = after
        if node.maximum is None:
            loop, back = self._new_state(), self._new_state()
            self._free[start].append(loop)
            self._build(node.node, loop, back)
            self._free[back].append(loop)
            self._free[loop].append(stop)
            return
        for _ in range(node.maximum - node.minimum):
            self._free[start].append(stop)
            after = self._new_state()
            self._build(node.node, start, after)
            start = after
        self._free[start].append(stop)
