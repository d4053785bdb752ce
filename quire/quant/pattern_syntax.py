"""Parser for the subset of regular expressions that is supported for module names."""

from __future__ import annotations

from dataclasses import dataclass

from quire.base.errors import UnsupportedError

_MAX_LENGTH = 1024
_MAX_DEPTH = 20
_MAX_COUNT = 256
_CLASSES: dict[str, tuple[tuple[str, str], ...]] = {
    "d": (("0", "9"),),
    "w": (("0", "9"), ("A", "Z"), ("_", "_"), ("a", "z")),
    "s": ((" ", " "), ("\t", "\r")),
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}


@dataclass(frozen=True, slots=True)
class Chars:
    """One character in inclusive ranges, or, if negated, outside all of them."""

    ranges: tuple[tuple[str, str], ...] = ()
    is_negated: bool = False

    def holds(self, character: str) -> bool:
        """Return whether a character matches."""
        return any(low <= character <= high for low, high in self.ranges) != self.is_negated


@dataclass(frozen=True, slots=True)
class Edge:
    """The start ("^") or the end ("$") of the name."""

    kind: str


@dataclass(frozen=True, slots=True)
class Repeat:
    """A node repeated `minimum` to `maximum` times; None: unlimited."""

    node: Node
    minimum: int
    maximum: int | None


@dataclass(frozen=True, slots=True)
class Chain:
    """A sequence of nodes."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """One of several nodes."""

    choices: tuple[Node, ...]


Node = Chars | Edge | Repeat | Chain | Alternatives


def parse_pattern(text: str) -> Node:
    """Return the syntax tree of a pattern. Raises UnsupportedError with the pattern and what is wrong with it."""
    if len(text) > _MAX_LENGTH:
        raise UnsupportedError(
            f"a pattern of {len(text)} characters ({text[:40]!r}...) in the quantisation config is too long; "
            f"at most {_MAX_LENGTH} are read"
        )
    parser = _Parser(text)
    node = parser.alternatives(0)
    if parser.position < len(text):
        raise parser.error("')' without '('")
    return node


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def error(self, problem: str) -> UnsupportedError:
        return UnsupportedError(
            f"the pattern {self.text[:80]!r} of the quantisation config is not supported: {problem} at character "
            f"{self.position}; supported: literals, classes, groups, |, *, +, ?, {{m,n}}, ^, $"
        )

    def alternatives(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise self.error(f"groups nested deeper than {_MAX_DEPTH}")
        choices = [self._sequence(depth)]
        while self._take("|"):
            choices.append(self._sequence(depth))
        return choices[0] if len(choices) == 1 else Alternatives(tuple(choices))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom(depth)))
        return Chain(tuple(parts))

    def _repeated(self, node: Node) -> Node:
        bounds = self._bounds()
        if bounds is None:
            return node
        if isinstance(node, Edge):
            raise self.error("a repeated '^' or '$'")
        self._take("?")
        if self._peek() in ("*", "+") or (self._peek() == "{" and self._bounds() is not None):
            raise self.error("a repetition of a repetition without a group")
        return Repeat(node, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        if self._peek() != "{":
            return None
        stop = self.text.find("}", self.position)
        low, comma, high = self.text[self.position + 1 : stop].partition(",")
        numbers = [part for part in (low, high) if part]
        if stop < 0 or not numbers or not all(part.isascii() and part.isdigit() and len(part) < 6 for part in numbers):
            raise self.error("a '{' that starts no count (write '\\{' for the character)")
        minimum = int(low or 0)
        maximum = int(high) if high else None if comma else minimum
        if max(map(int, numbers)) > _MAX_COUNT or (maximum is not None and maximum < minimum):
            raise self.error(f"a count that is not from 0 to {_MAX_COUNT}, ascending")
        self.position = stop + 1
        return minimum, maximum

    def _atom(self, depth: int) -> Node:
        character = self._next()
        if character == "(":
            if self._take("?") and not self._take(":"):
                raise self.error("'(?' other than '(?:' (look-around, flags, named groups)")
            node = self.alternatives(depth + 1)
            if not self._take(")"):
                raise self.error("'(' without ')'")
            return node
        if character in ("^", "$"):
            return Edge(character)
        if character == ".":
            return Chars((("\n", "\n"),), is_negated=True)
        if character == "[":
            return self._class()
        if character == "\\":
            return self._escape()
        if character in "*+?{":
            raise self.error("nothing to repeat")
        return Chars(((character, character),))

    def _escape(self) -> Chars:
        character = self._next()
        if character.lower() in _CLASSES:
            return Chars(_CLASSES[character.lower()], is_negated=character.isupper())
        if character in _ESCAPES:
            character = _ESCAPES[character]
        elif not character or (character.isalnum() and character.isascii()):
            raise self.error(f"the escape '\\{character}'")
        return Chars(((character, character),))

    def _class(self) -> Chars:
        is_negated = self._take("^")
        ranges: list[tuple[str, str]] = []
        while self._peek() != "]" or not ranges:
            low = self._member()
            if isinstance(low, Chars):
                ranges += low.ranges
                continue
            high: str | Chars = low
            if self._peek() == "-" and self.text[self.position + 1 : self.position + 2] not in ("]", ""):
                self.position += 1
                high = self._member()
            if isinstance(high, Chars) or high < low:
                raise self.error("a range that does not ascend")
            ranges.append((low, high))
        self.position += 1
        return Chars(tuple(ranges), is_negated)

    def _member(self) -> str | Chars:
        """Return one character of a class, or several for an escape."""
        character = self._next()
        if not character:
            raise self.error("'[' without ']'")
        if character != "\\":
            return character
        escaped = self._escape()
        if escaped.is_negated:
            raise self.error("a complement inside a class")
        is_single = len(escaped.ranges) == 1 and escaped.ranges[0][0] == escaped.ranges[0][1]
        return escaped.ranges[0][0] if is_single else escaped

    def _peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def _next(self) -> str:
        character = self._peek()
        self.position += len(character)
        return character

    def _take(self, character: str) -> bool:
        is_there = self._peek() == character
        self.position += is_there
        return is_there
