"""Reader: the incoming text of an output, read by generators that yield whenever they need more of it.

The result of a generator must not depend on how the text was split: it waits as long as more text could change the result.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

MAX_HEADER_CHARACTERS = 512
MAX_SKIPPED_SPACES = 1024
_SPACE = re.compile(r"[ \t\r\n]*")


class RefusedError(Exception):
    """The text is not a tool call, although it began like one."""


class LimitError(RefusedError):
    """The held text exceeds the limit."""


class OutputEndError(RefusedError):
    """The output has ended."""


class Reader:
    """The unread text and the reading position.

    text, position  the next character is text[position]; both move when text is fed, so keep only distances across a yield
    num_steps       the number of inspected characters (with repetitions) and waits; it grows linearly
    """

    __slots__ = ("_limit", "_mark", "is_closed", "num_steps", "position", "text")

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.is_closed = False
        self.num_steps = 0
        self._mark: int | None = None
        self._limit = 0

    def feed(self, text: str) -> None:
        """Add text at the end."""
        kept = self.position if self._mark is None else self._mark
        self.num_steps += len(text) + 1
        self.text = self.text[kept:] + text
        self.position -= kept
        self._mark = None if self._mark is None else 0

    def mark(self, num_behind: int, limit: int) -> None:
        """Keep the text from num_behind characters before the position on, at most `limit` characters of it."""
        self._mark = self.position - num_behind
        self._limit = limit

    def unmark(self) -> None:
        """Remove the mark. Raises LimitError if more was read since than may be held."""
        mark, self._mark = self._mark, None
        if mark is not None and self.position - mark > self._limit:
            self._mark = mark
            raise LimitError

    def go_back(self, num_kept: int, error: RefusedError) -> str:
        """Go back to the mark because of `error`; return the part of the text that will not be read again.

        num_kept  characters after the mark that are not read again; all of them if reading again would take long
        """
        mark = self.position if self._mark is None else self._mark
        end = mark + self._limit if isinstance(error, LimitError) else self.position
        end = len(self.text) if isinstance(error, OutputEndError) else end
        end = min(end, mark + self._limit)
        if end - mark <= MAX_HEADER_CHARACTERS:
            end = mark + num_kept
        self.position, self._mark = end, None
        return self.text[mark:end]

    def wait(self) -> Steps[None]:
        """Wait for more text. Raises OutputEndError if the output has ended, LimitError if too much is held."""
        self.num_steps += 1
        if self._mark is not None and len(self.text) - self._mark > self._limit:
            raise LimitError
        if self.is_closed:
            raise OutputEndError
        yield

    def take(self, end: int) -> str:
        """Read up to text[end]."""
        taken = self.text[self.position : end]
        self.num_steps += len(taken)
        self.position = end
        return taken

    def peek(self) -> Steps[str]:
        """Return the next character without reading it. Raises OutputEndError."""
        while self.position >= len(self.text):
            yield from self.wait()
        return self.text[self.position]

    def skip_space(self) -> Steps[None]:
        """Read white space. Raises OutputEndError if nothing follows."""
        while True:
            found = _SPACE.match(self.text, self.position)
            self.take(self.position if found is None else found.end())
            if self.position < len(self.text):
                return
            yield from self.wait()

    def expect(self, options: tuple[str, ...]) -> Steps[str]:
        """Read one of the options. Raises RefusedError if none is next."""
        found = yield from self.match(options)
        if found is None:
            if self.position + max(map(len, options)) > len(self.text) and self.is_closed:
                raise OutputEndError
            raise RefusedError
        return found

    def match(self, options: tuple[str, ...], *, skips_space: bool = False) -> Steps[str | None]:
        """Return and read the option that is next, or return None and read nothing; no option begins another."""
        offset = 0
        while True:
            if skips_space:
                found = _SPACE.match(self.text, self.position + offset)
                offset = offset if found is None else found.end() - self.position
            at = self.position + offset
            self.num_steps += 1
            for option in options:
                if self.text.startswith(option, at):
                    self.take(at + len(option))
                    return option
            if offset > MAX_SKIPPED_SPACES or self.is_closed or not self._may_become(options, at):
                return None
            yield from self.wait()

    def read_until(self, ends: tuple[str, ...], stops: tuple[str, ...] = ()) -> Steps[str]:
        """Return the text before the first of ends or stops, none of which contains another; an end is read too.

        Raises RefusedError if there is none within MAX_HEADER_CHARACTERS.
        """
        options = (*ends, *stops)
        longest = max(map(len, options))
        while True:
            last = self.position + MAX_HEADER_CHARACTERS
            found = [(at, end) for end in options if (at := self.text.find(end, self.position, last + len(end))) >= 0]
            at, end = min(found, default=(last + 1, ""))
            self.num_steps += min(at, len(self.text)) - self.position + 1
            if found:
                header = self.text[self.position : at]
                self.take(at + len(end) if end in ends else at)
                return header
            if len(self.text) > last + longest:
                raise RefusedError
            yield from self.wait()

    def _may_become(self, options: tuple[str, ...], at: int) -> bool:
        num_available = len(self.text) - at
        return any(len(option) > num_available and option.startswith(self.text[at:]) for option in options)
