"""The events of the parser of model output, and the message that they form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of the visible answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. index counts the calls of the message from 0, in order."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments; the pieces of a call are concatenated unchanged."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a tool call. Every CallStart gets one, before the next CallStart; if the output was truncated, the arguments
    are incomplete."""

    index: int


ParserEvent = TextPiece | ReasoningPiece | CallStart | CallArguments | CallEnd


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A whole tool call; arguments is the JSON text."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A whole message; "" without content or reasoning."""

    content: str
    reasoning: str
    calls: tuple[ParsedCall, ...]


def fold(events: Iterable[ParserEvent]) -> ParsedMessage:
    """Return the message that all events of one output form."""
    content: list[str] = []
    reasoning: list[str] = []
    starts: list[CallStart] = []
    arguments: list[list[str]] = []
    for event in events:
        if isinstance(event, TextPiece):
            content.append(event.text)
        elif isinstance(event, ReasoningPiece):
            reasoning.append(event.text)
        elif isinstance(event, CallStart):
            starts.append(event)
            arguments.append([])
        elif isinstance(event, CallArguments):
            arguments[event.index].append(event.text)
    calls = zip(starts, arguments, strict=True)
    return ParsedMessage(
        "".join(content),
        "".join(reasoning),
        tuple(ParsedCall(start.call_id, start.name, "".join(pieces)) for start, pieces in calls),
    )
