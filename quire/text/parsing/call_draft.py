"""EventSink, which collects events, and CallDraft, a possible tool call that is not accepted yet."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from typing import Literal

from quire.text.parsing.events import CallArguments, CallEnd, CallStart, ParserEvent, ReasoningPiece, TextPiece
from quire.text.parsing.reader import Reader, RefusedError
from quire.text.parsing.tools import Tool

_ALPHABET = string.ascii_letters + string.digits

MakeCallId = Callable[[str, int], str]


def make_random_id(name: str, index: int) -> str:
    """Return call_ and 24 random letters and digits."""
    return f"call_{_random_text(24)}"


def make_short_id(name: str, index: int) -> str:
    """Return 9 random letters and digits, as Mistral's templates require."""
    return _random_text(9)


def _random_text(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


class EventSink:
    """Collects events; neighbouring pieces of the same kind become one.

    restore  turns the text that the parser sees into the text of the output
    """

    def __init__(self, restore: Callable[[str], str]) -> None:
        self.num_calls = 0
        self.has_text = False
        self._restore = restore
        self._events: list[ParserEvent] = []
        self._kind: Literal["text", "reasoning", "arguments"] = "text"
        self._pieces: list[str] = []

    def write(self, text: str, is_reasoning: bool) -> None:
        """Add a piece of content or reasoning."""
        if text:
            self.has_text = True
            self._add("reasoning" if is_reasoning else "text", text)

    def write_arguments(self, text: str) -> None:
        """Add a piece of the arguments of the call that was started last."""
        if text:
            self._add("arguments", text)

    def start_call(self, call_id: str, name: str) -> None:
        """Begin a call; it ends at end_call."""
        self._flush()
        self._events.append(CallStart(self.num_calls, call_id, name))
        self.num_calls += 1

    def end_call(self) -> None:
        """End the call that was started last."""
        self._flush()
        self._events.append(CallEnd(self.num_calls - 1))

    def take(self) -> list[ParserEvent]:
        """Return the events since the last time."""
        self._flush()
        taken, self._events = self._events, []
        return taken

    def _add(self, kind: Literal["text", "reasoning", "arguments"], text: str) -> None:
        if kind != self._kind:
            self._flush()
            self._kind = kind
        self._pieces.append(text)

    def _flush(self) -> None:
        if not self._pieces:
            return
        text = self._restore("".join(self._pieces))
        self._pieces.clear()
        if self._kind == "arguments":
            self._events.append(CallArguments(self.num_calls - 1, text))
        else:
            self._events.append(ReasoningPiece(text) if self._kind == "reasoning" else TextPiece(text))


class CallDraft:
    """A possible call: the reader holds its text until it is accepted, which needs the name of a known tool."""

    __slots__ = ("_accept", "_restore", "is_accepted", "is_in_list", "reader", "sink", "tools")

    def __init__(
        self,
        reader: Reader,
        sink: EventSink,
        tools: Mapping[str, Tool],
        accept: Callable[[str, str | None], None],
        restore: Callable[[str], str],
    ) -> None:
        self.reader = reader
        self.sink = sink
        self.tools = tools
        self.is_accepted = False
        self.is_in_list = False
        self._accept = accept
        self._restore = restore

    def accept(self, name: str, own_id: str | None = None) -> Tool:
        """Accept the call and begin it. Raises RefusedError if no tool has that name."""
        tool = self.tools.get(self._restore(name))
        if tool is None:
            raise RefusedError
        self.reader.unmark()
        self.is_accepted = True
        self._accept(tool.name, own_id)
        return tool

    def write(self, text: str) -> None:
        """Add to the arguments."""
        self.sink.write_arguments(text)
