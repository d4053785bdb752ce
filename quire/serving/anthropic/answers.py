"""Messages from events: one state machine makes the API's events; a stream encodes them, a whole answer accumulates them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from quire.api.anthropic.answers import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputPiece,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    Piece,
    SignaturePiece,
    Stop,
    StopReason,
    StreamEvent,
    Text,
    TextPiece,
    Thinking,
    ThinkingPiece,
    ThinkingTokens,
    ToolUse,
    Usage,
)
from quire.serving.core.events import (
    ChoiceEnd,
    GenerationEvent,
    GenerationStart,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    UsageEnd,
)
from quire.serving.core.partial_json import is_json, read_partial
from quire.serving.core.sse import named_frame
from quire.serving.errors import ApiError
from quire.serving.openai.frames import encode_json

JSON_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageHead:
    """The fixed parts of an answer.

    max_tokens  that the client allows
    sign        gives the signature of a block of reasoning
    """

    id: str
    model: str
    max_tokens: int
    sign: Callable[[str], str]


class MessageMachine:
    """Turns the events of one generation into the API's events: one block is open at a time, indexes count from 0."""

    def __init__(self, head: MessageHead) -> None:
        self._head = head
        self._index = -1
        self._open: Block | None = None
        self._pieces: list[str] = []
        self._end: ChoiceEnd | None = None

    def feed(self, events: Sequence[GenerationEvent]) -> list[StreamEvent]:
        """Return the API events for some events; UsageEnd ends the message."""
        found: list[StreamEvent] = []
        for event in events:
            self._take(event, found)
        return found

    def _take(self, event: GenerationEvent, found: list[StreamEvent]) -> None:
        if isinstance(event, TextDelta):
            if not isinstance(self._open, Text):
                self._start(Text(""), found)
            self._add(TextPiece(event.text), event.text, found)
        elif isinstance(event, ReasoningDelta):
            if not isinstance(self._open, Thinking):
                self._start(Thinking("", ""), found)
            self._add(ThinkingPiece(event.text), event.text, found)
        elif isinstance(event, ToolCallStart):
            self._start(ToolUse(event.call_id, event.name, {}), found)
        elif isinstance(event, ToolCallArguments):
            # Clients parse the accumulated JSON after every piece, and would fail on whitespace only.
            text = event.text if self._pieces else event.text.lstrip(JSON_SPACE)
            self._add(InputPiece(text), text, found)
        elif isinstance(event, ToolCallEnd):
            self._stop(found)
        elif isinstance(event, ChoiceEnd):
            self._stop(found)
            self._end = event
        elif isinstance(event, GenerationStart):
            usage = _usage(event.num_prompt, event.num_cached, 0)
            found.append(MessageStart(Message(self._head.id, "assistant", self._head.model, [], None, None, usage)))
        elif isinstance(event, UsageEnd):
            self._finish(event, found)

    def _start(self, block: Block, found: list[StreamEvent]) -> None:
        self._stop(found)
        self._index += 1
        self._open = block
        self._pieces = []
        found.append(BlockStart(self._index, block))

    def _add(self, piece: Piece, text: str, found: list[StreamEvent]) -> None:
        if text:
            self._pieces.append(text)
            found.append(BlockDelta(self._index, piece))

    def _stop(self, found: list[StreamEvent]) -> None:
        if self._open is None:
            return
        if isinstance(self._open, Thinking):
            found.append(BlockDelta(self._index, SignaturePiece(self._head.sign("".join(self._pieces)))))
        found.append(BlockStop(self._index))
        self._open = None

    def _finish(self, event: UsageEnd, found: list[StreamEvent]) -> None:
        end = self._end
        if end is None:
            raise ApiError(500, "the answer is incomplete", code="internal_error")
        reason = self._stop_reason(end, event.num_completion)
        stop = Stop(reason, str(end.stop_reason) if reason == "stop_sequence" else None)
        usage = _usage(event.num_prompt, event.num_cached, event.num_completion)
        usage.output_tokens_details = ThinkingTokens(event.num_reasoning)
        found += [MessageDelta(stop, usage), MessageStop()]

    def _stop_reason(self, end: ChoiceEnd, num_tokens: int) -> StopReason:
        if end.finish_reason == "length":
            return "max_tokens" if num_tokens >= self._head.max_tokens else "model_context_window_exceeded"
        is_stopped = isinstance(end.stop_reason, str)
        if end.finish_reason == "tool_calls" and not (is_stopped and not is_json("".join(self._pieces))):
            return "tool_use"
        return "stop_sequence" if is_stopped else "end_turn"


def _usage(num_prompt: int, num_cached: int, num_output: int) -> Usage:
    return Usage(
        input_tokens=num_prompt - num_cached,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=num_cached,
        output_tokens=num_output,
        service_tier="standard",
    )


class MessageStreamEncoder:
    """Turns the events of one generation into server-sent events."""

    def __init__(self, head: MessageHead) -> None:
        self._machine = MessageMachine(head)

    def encode(self, events: Sequence[GenerationEvent]) -> bytes:
        """Return the frames for some events, b"" for none."""
        return b"".join([named_frame(event) for event in self._machine.feed(events)])

    def encode_text(self, choice: int, text: str) -> bytes:
        """Return the frame for a TextDelta without positions."""
        return self.encode([TextDelta(choice, text)])


class MessageFold:
    """Accumulates the events of one generation into the whole answer, as a client of the stream does."""

    def __init__(self, head: MessageHead) -> None:
        self._machine = MessageMachine(head)
        self._message: Message | None = None
        self._pieces: list[list[str]] = []

    def add(self, events: Sequence[GenerationEvent]) -> None:
        """Add some events."""
        for event in self._machine.feed(events):
            if isinstance(event, MessageStart):
                self._message = event.message
            elif self._message is not None:
                self._add(self._message, event)

    @property
    def is_long(self) -> bool:
        """Whether encoding the answer takes long; plain text does not."""
        return False

    def body(self) -> bytes:
        """Return the answer. Raises ApiError if events are missing."""
        if self._message is None or self._message.stop_reason is None:
            raise ApiError(500, "the answer is incomplete", code="internal_error")
        return encode_json(self._message)

    def _add(self, message: Message, event: StreamEvent) -> None:
        if isinstance(event, BlockStart):
            message.content.append(event.content_block)
            self._pieces.append([])
        elif isinstance(event, BlockDelta):
            if isinstance(event.delta, SignaturePiece):
                message.content[event.index].signature = event.delta.signature  # type: ignore[union-attr]
            else:
                self._pieces[event.index].append(msgspec.structs.astuple(event.delta)[0])
        elif isinstance(event, BlockStop):
            _complete(message.content[event.index], "".join(self._pieces[event.index]))
        elif isinstance(event, MessageDelta):
            message.stop_reason, message.stop_sequence = event.delta.stop_reason, event.delta.stop_sequence
            message.usage = event.usage


def _complete(block: Block, text: str) -> None:
    if isinstance(block, Text):
        block.text = text
    elif isinstance(block, Thinking):
        block.thinking = text
    else:
        block.input = read_partial(text)
