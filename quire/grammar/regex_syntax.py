"""Parses regular expressions of JSON schemas into a tree, for RegexAutomaton.

Both the syntax of ECMA-262 and that of Rust's regex crate are accepted. A class that is not known exactly, such as `\\p{L}`, is
read as any character: texts from the automaton have to be checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Ranges = tuple[tuple[int, int], ...]
"""Code points, both ends of each range inclusive, sorted and disjoint."""

_MAX_CODE_POINT = 0x10FFFF
_MAX_DEPTH = 60
_MAX_REPEAT = 2000
ANY: Ranges = ((0, _MAX_CODE_POINT),)
_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_LETTERS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "a": 7, "e": 27}
_POSIX: dict[str, Ranges] = {
    "alnum": ((0x30, 0x39), (0x41, 0x5A), (0x61, 0x7A)),
    "alpha": ((0x41, 0x5A), (0x61, 0x7A)),
    "digit": _DIGITS,
    "lower": ((0x61, 0x7A),),
    "upper": ((0x41, 0x5A),),
    "space": _SPACE,
    "word": _WORD,
    "xdigit": ((0x30, 0x39), (0x41, 0x46), (0x61, 0x66)),
    "punct": ((0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E)),
}


class UnreadablePatternError(ValueError):
    """An expression is invalid, or has a feature that such an automaton does not support, for example look-around."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Anchor:
    """The beginning or the end of the text."""

    side: Literal["begin", "end"]


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence of parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """An alternative of parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part from `least` to `most` times; most None: any number."""

    part: Node
    least: int
    most: int | None


Node = Chars | Anchor | Sequence | Choice | Repeat


def read_pattern(pattern: str) -> Node:
    """Return the syntax tree of an expression. Raises UnreadablePatternError."""
    reader = _Reader(pattern)
    node = reader.choice(0)
    if reader.at < len(pattern):
        raise UnreadablePatternError(f"{pattern[reader.at]!r} at {reader.at} opens nothing")
    return node


def invert(ranges: Ranges) -> Ranges:
    """Return the complement."""
    found: list[tuple[int, int]] = []
    low = 0
    for begin, end in ranges:
        if begin > low:
            found.append((low, begin - 1))
        low = end + 1
    return (*found, (low, _MAX_CODE_POINT)) if low <= _MAX_CODE_POINT else tuple(found)


def merge(ranges: list[tuple[int, int]]) -> Ranges:
    """Return ranges sorted and disjoint."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return tuple(found)


def _both_cases(ranges: Ranges) -> Ranges:
    """Return ranges with the ASCII letters of the other case added."""
    found = list(ranges)
    for begin, end in ranges:
        for first, last, shift in ((0x41, 0x5A, 32), (0x61, 0x7A, -32)):
            low, high = max(begin, first), min(end, last)
            if low <= high:
                found.append((low + shift, high + shift))
    return merge(found)


class _Reader:
    """Recursive-descent parser; at: the next character."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0
        self._ignores_case = self._dot_is_any = False

    def choice(self, depth: int) -> Node:
        """Parse alternatives up to the end or a closing parenthesis."""
        if depth > _MAX_DEPTH:
            raise UnreadablePatternError("groups are nested too deeply")
        parts = [self._sequence(depth)]
        while self._takes("|"):
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self._next not in ("", "|", ")"):
            part = self._repeated(self._atom(depth))
            if part is not None:
                parts.append(part)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    @property
    def _next(self) -> str:
        return self._pattern[self.at : self.at + 1]

    def _takes(self, text: str) -> bool:
        if not self._pattern.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def _take(self) -> str:
        if self.at >= len(self._pattern):
            raise UnreadablePatternError("it ends too soon")
        self.at += 1
        return self._pattern[self.at - 1]

    def _take_up_to(self, end: str) -> str:
        stop = self._pattern.find(end, self.at)
        if stop < 0:
            raise UnreadablePatternError(f"{end!r} is missing")
        found, self.at = self._pattern[self.at : stop], stop + len(end)
        return found

    def _repeated(self, part: Node | None) -> Node | None:
        while True:
            begin = self.at
            if self._takes("*"):
                bounds: tuple[int, int | None] = (0, None)
            elif self._takes("+"):
                bounds = (1, None)
            elif self._takes("?"):
                bounds = (0, 1)
            elif self._next == "{" and (counted := self._counts()) is not None:
                bounds = counted
            else:
                self.at = begin
                return part
            self._takes("?")  # lazy, which does not change what is matched
            if part is None:
                raise UnreadablePatternError("nothing is there to repeat")
            part = Repeat(part, *bounds)

    def _counts(self) -> tuple[int, int | None] | None:
        """Parse {2}, {2,} or {2,3}; None if the brace is a literal character."""
        stop = self._pattern.find("}", self.at)
        least, comma, most = self._pattern[self.at + 1 : max(stop, 0)].partition(",")
        if not least.isdecimal() or (most and not most.isdecimal()):
            return None
        if max(len(least), len(most)) > 4 or int(most or least) > _MAX_REPEAT or int(least) > _MAX_REPEAT:
            raise UnreadablePatternError("a part is repeated too often")
        self.at = stop + 1
        return int(least), int(most) if most else None if comma else int(least)

    def _atom(self, depth: int) -> Node | None:
        """Parse one part; None for flags, which match nothing."""
        character = self._take()
        if character == "(":
            return self._group(depth)
        if character == "[":
            return Chars(self._cased(self._class()))
        if character == ".":
            return Chars(ANY if self._dot_is_any else invert(((10, 10),)))
        if character in "^$":
            return Anchor("begin" if character == "^" else "end")
        if character == "\\":
            if self._next in ("A", "z", "Z"):
                return Anchor("begin" if self._take() == "A" else "end")
            return Chars(self._cased(self._escape(in_class=False)))
        if character in "*+?":
            raise UnreadablePatternError("nothing is there to repeat")
        return Chars(self._cased(((ord(character), ord(character)),)))

    def _cased(self, ranges: Ranges) -> Ranges:
        return _both_cases(ranges) if self._ignores_case else ranges

    def _group(self, depth: int) -> Node | None:
        flags = self._ignores_case, self._dot_is_any
        if self._takes("?"):
            if self._takes("P<") or (self._next == "<" and self._pattern[self.at + 1 : self.at + 2] not in ("=", "!")):
                self._take_up_to(">")
            elif not self._takes(":"):
                self._set_flags()
                if self._pattern[self.at - 1] == ")":
                    return None
        found = self.choice(depth + 1)
        if not self._takes(")"):
            raise UnreadablePatternError("a group is not closed")
        self._ignores_case, self._dot_is_any = flags
        return found

    def _set_flags(self) -> None:
        """Parse flags up to ) or :; they apply up to the end of the group."""
        value = True
        while (flag := self._take()) not in (")", ":"):
            if flag == "-":
                value = False
            elif flag == "i":
                self._ignores_case = value
            elif flag == "s":
                self._dot_is_any = value
            elif flag not in "uU":
                raise UnreadablePatternError(f"(?{flag} is not known here")

    def _class(self) -> Ranges:
        """Parse a class after its opening bracket."""
        is_negated, found, is_first = self._takes("^"), list[tuple[int, int]](), True
        while is_first or self._next != "]":
            is_first = False
            if self._pattern[self.at : self.at + 2] in ("&&", "--", "~~"):
                self._skip_class()
                return ANY
            low = self._class_part()
            if self._next == "-" and self._pattern[self.at + 1 : self.at + 2] not in ("]", "-", "") and len(low) == 1:
                self._take()
                high = self._class_part()
                if high[-1][1] < low[0][0]:
                    raise UnreadablePatternError("a range of a class has its ends the wrong way round")
                found.append((low[0][0], high[-1][1]))
            else:
                found += low
        self._take()
        return invert(merge(found)) if is_negated else merge(found)

    def _class_part(self) -> Ranges:
        if self._takes("[:"):
            name = self._take_up_to(":]")
            ranges = _POSIX.get(name.lstrip("^"), ANY)
            return invert(ranges) if name.startswith("^") and ranges != ANY else ranges
        character = self._take()
        if character == "[":
            return self._class()
        if character == "\\":
            return self._escape(in_class=True)
        return ((ord(character), ord(character)),)

    def _skip_class(self) -> None:
        """Skip the rest of a class that contains nested classes."""
        depth = 1
        while depth:
            character = self._take()
            if character == "\\":
                self._take()
            depth += {"[": 1, "]": -1}.get(character, 0)

    def _escape(self, in_class: bool) -> Ranges:
        """Parse an escape after its backslash."""
        character = self._take()
        known = {"d": _DIGITS, "w": _WORD, "s": _SPACE}.get(character.lower())
        if known is not None:
            return known if character.islower() else invert(known)
        if character in "pP":
            if self._takes("{"):
                self._take_up_to("}")
            else:
                self._take()
            return ANY
        if character in "xuU":
            return self._code_point(character)
        if character == "c":
            return ((ord(self._take().upper()) % 32,) * 2,)
        if character in _LETTERS:
            return ((_LETTERS[character],) * 2,)
        if character == "b" and in_class:
            return ((8, 8),)
        if character == "0":
            return ((0, 0),)
        if character.isalnum():
            raise UnreadablePatternError(f"\\{character} is not known here")
        return ((ord(character), ord(character)),)

    def _code_point(self, kind: str) -> Ranges:
        if self._takes("{"):
            digits = self._take_up_to("}")
        else:
            digits = "".join(self._take() for _ in range({"x": 2, "u": 4, "U": 8}[kind]))
        try:
            value = int(digits, 16)
        except ValueError:
            raise UnreadablePatternError(f"{digits!r} is no code point") from None
        return ((value, value),)
