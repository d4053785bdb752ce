"""Answers out of events: a line for each piece in a stream, or the whole answer, the same fields in both."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.api.ollama.answers import (
    AnsweredFunction,
    AnsweredTool,
    AnswerMessage,
    ChatAnswer,
    DoneReason,
    GenerateAnswer,
)
from quire.serving.core.events import (
    ChoiceEnd,
    GenerationEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    UsageEnd,
)
from quire.serving.errors import ApiError
from quire.serving.ollama.names import line, moment


@dataclass(slots=True)
class AnswerPieces:
    """What some events of one generation have brought."""

    text: str = ""
    thinking: str = ""
    calls: list[AnsweredTool] = field(default_factory=list[AnsweredTool])


@dataclass(slots=True)
class AnswerReader:
    """Reads the events of one generation, and keeps the times and counts for the last line.

    received_s  when the request had arrived, of time.monotonic()
    """

    model: str
    received_s: float
    _name: str = ""
    _arguments: list[str] = field(default_factory=list[str])
    _reason: DoneReason = "stop"
    _first_s: float | None = None

    def read(self, events: Sequence[GenerationEvent]) -> tuple[AnswerPieces, UsageEnd | None]:
        """Return what the events bring, and the last of them once it is there."""
        pieces, usage = AnswerPieces(), None
        for event in events:
            if self._first_s is None:
                self._first_s = time.monotonic()
            if isinstance(event, TextDelta):
                pieces.text += event.text
            elif isinstance(event, ReasoningDelta):
                pieces.thinking += event.text
            elif isinstance(event, ToolCallStart):
                self._name, self._arguments = event.name, []
            elif isinstance(event, ToolCallArguments):
                self._arguments.append(event.text)
            elif isinstance(event, ToolCallEnd):
                pieces.calls.append(AnsweredTool(AnsweredFunction(self._name, self._read_arguments())))
            elif isinstance(event, ChoiceEnd):
                self._reason = "length" if event.finish_reason == "length" else "stop"
            elif isinstance(event, UsageEnd):
                usage = event
        return pieces, usage

    def _read_arguments(self) -> dict[str, object]:
        """Return the arguments of a call, {} where the output was cut before they were complete."""
        try:
            found = json.loads("".join(self._arguments) or "{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {"value": found}

    def counts(self, usage: UsageEnd) -> dict[str, int | str]:
        """Return the fields that only the last line has."""
        now_s = time.monotonic()
        first_s = now_s if self._first_s is None else self._first_s
        return {
            "done_reason": self._reason,
            "total_duration": _nanoseconds(now_s - self.received_s),
            "load_duration": 0,
            "prompt_eval_count": usage.num_prompt,
            "prompt_eval_duration": _nanoseconds(first_s - self.received_s),
            "eval_count": usage.num_completion,
            "eval_duration": _nanoseconds(now_s - first_s),
        }

    def chat(self, pieces: AnswerPieces, usage: UsageEnd | None) -> ChatAnswer:
        """Return a line of /api/chat, with `usage` the last one."""
        message = AnswerMessage(
            role="assistant", content=pieces.text, thinking=pieces.thinking or None, tool_calls=pieces.calls or None
        )
        counts = {} if usage is None else self.counts(usage)
        return ChatAnswer(model=self.model, created_at=moment(), message=message, done=usage is not None, **counts)  # type: ignore[arg-type]

    def generate(self, pieces: AnswerPieces, usage: UsageEnd | None) -> GenerateAnswer:
        """Return a line of /api/generate, with `usage` the last one."""
        counts = {} if usage is None else self.counts(usage)
        return GenerateAnswer(
            model=self.model,
            created_at=moment(),
            response=pieces.text,
            thinking=pieces.thinking or None,
            done=usage is not None,
            **counts,  # type: ignore[arg-type]
        )


class LineEncoder:
    """Turns the events of one generation into lines of JSON."""

    def __init__(self, reader: AnswerReader, is_chat: bool) -> None:
        self._reader = reader
        self._make = reader.chat if is_chat else reader.generate

    def encode(self, events: Sequence[GenerationEvent]) -> bytes:
        """Return the lines that some events cause, b"" for none."""
        pieces, usage = self._reader.read(events)
        found = b""
        if pieces.text or pieces.thinking or pieces.calls:
            found = line(self._make(pieces, None))
        return found if usage is None else found + line(self._make(AnswerPieces(), usage))

    def encode_text(self, choice: int, text: str) -> bytes:
        """Return what a TextDelta without positions causes."""
        return self.encode([TextDelta(choice, text)])


class AnswerFold:
    """Adds the events of one generation up to the whole answer."""

    is_long = False

    def __init__(self, reader: AnswerReader, is_chat: bool) -> None:
        self._reader = reader
        self._make = reader.chat if is_chat else reader.generate
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[AnsweredTool] = []
        self._usage: UsageEnd | None = None

    def add(self, events: Sequence[GenerationEvent]) -> None:
        """Take in some events."""
        pieces, usage = self._reader.read(events)
        self._texts.append(pieces.text)
        self._thoughts.append(pieces.thinking)
        self._calls += pieces.calls
        self._usage = usage or self._usage

    def body(self) -> bytes:
        """Return the answer. Raises ApiError where the events are not all there."""
        if self._usage is None:
            raise ApiError(500, "the answer is incomplete", code="internal_error")
        pieces = AnswerPieces("".join(self._texts), "".join(self._thoughts), self._calls)
        return line(self._make(pieces, self._usage))


def _nanoseconds(seconds: float) -> int:
    return max(int(seconds * 1e9), 0)
