"""ResponseMachine: turns the events of one generation into those of the Responses API, and into the response."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.api.openai.answers import ReasoningTokens
from quire.api.openai.responses import CUSTOM_INPUT
from quire.api.openai.responses_answers import (
    ArgumentsDone,
    ArgumentsPiece,
    Completed,
    Created,
    CustomInputDone,
    CustomInputPiece,
    ErrorEvent,
    Event,
    Failed,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputTokens,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDone,
    ReasoningPiece,
    Response,
    ResponseError,
    ResponseUsage,
    TextDone,
    TextPiece,
)
from quire.api.openai.responses_items import (
    ItemStatus,
    OutputCall,
    OutputCustomCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
)
from quire.serving.core.events import (
    ChoiceEnd,
    GenerationEvent,
    GenerationStart,
    Position,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    UsageEnd,
)
from quire.serving.core.partial_json import is_json, read_partial
from quire.serving.errors import ApiError
from quire.serving.openai.logprobs import MANY_POSITIONS, LogprobWriter, encoded
from quire.serving.openai.requests import make_id


@dataclass(slots=True)
class _OpenItem:
    """The item in progress; `call` is None except for a call of a function or custom tool."""

    id: str
    is_reasoning: bool = False
    call: ToolCallStart | None = None
    is_custom: bool = False
    index: int = 0
    pieces: list[str] = field(default_factory=list[str])
    logprobs: list[Any] = field(default_factory=list[Any])  # ChatLogprobs, encoded

    @property
    def is_message(self) -> bool:
        return self.call is None and not self.is_reasoning

    def item(self, status: ItemStatus) -> OutputItem:
        """Return the present item, without its content while it is in progress."""
        is_begun = status == "in_progress"
        text = "" if is_begun else "".join(self.pieces)
        if self.call is not None and self.is_custom:
            return OutputCustomCall(self.id, self.call.call_id, self.call.name, "" if is_begun else self.custom_input(), status)
        if self.call is not None:
            return OutputCall(self.id, self.call.call_id, self.call.name, text, status)
        if self.is_reasoning:
            return OutputReasoning(self.id, [], [] if is_begun else [ReasoningText(text)], status)
        return OutputMessage(self.id, "assistant", status, [] if is_begun else [OutputText(text, [], self.logprobs)])

    def custom_input(self) -> str:
        """Return the input of a custom tool: its function's single string argument, or all arguments if they have another
        form."""
        arguments = "".join(self.pieces)
        found = read_partial(arguments)
        text = found.get(CUSTOM_INPUT) if isinstance(found, dict) else None
        return text if isinstance(text, str) else arguments


class ResponseMachine:
    """Makes the events of one response, which is complete after `finish`.

    response  the response in its initial state
    logprobs  the writer of log probabilities of the answer's tokens, None if not requested
    custom_tools  names of the custom tools
    clock     seconds since the epoch
    """

    def __init__(
        self,
        response: Response,
        logprobs: LogprobWriter | None = None,
        new_id: Callable[[str], str] = make_id,
        clock: Callable[[], float] = time.time,
        custom_tools: Collection[str] = (),
    ) -> None:
        self._response = response
        self._custom_tools = custom_tools
        self._logprobs = logprobs
        self._new_id = new_id
        self._clock = clock
        self._num_events = self._num_logprobs = 0
        self._output: list[OutputItem] = []
        self._open: _OpenItem | None = None
        self._end: ChoiceEnd | None = None
        self._usage: ResponseUsage | None = None

    @property
    def is_long(self) -> bool:
        """Whether the answer is so long that events with all of it should be encoded in a thread."""
        return self._num_logprobs > MANY_POSITIONS

    @property
    def has_started(self) -> bool:
        """Whether any event has been made."""
        return self._num_events > 0

    def feed(self, events: Sequence[GenerationEvent]) -> list[Event]:
        """Return the API events for some events; `finish` returns the last event of the response."""
        found: list[Event] = []
        for event in events:
            self._take(event, found)
        return found

    def response(self) -> Response:
        """Return the whole response. Raises ApiError if events are missing."""
        if self._end is None or self._usage is None:
            raise ApiError(500, "the answer is incomplete", code="internal_error")
        is_cut = self._end.finish_reason == "length"
        return msgspec.structs.replace(
            self._response,
            status="incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(self._clock()),
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            output=self._output,
            usage=self._usage,
        )

    def finish(self, response: Response) -> Event:
        """Return the last event, with the whole response."""
        return (Incomplete if response.status == "incomplete" else Completed)(self._next(), response)

    def failed_response(self, error: ApiError) -> Response:
        """Return the failed response, with its complete items."""
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        return msgspec.structs.replace(
            self._response, status="failed", error=ResponseError(code, error.message), output=self._output
        )

    def fail(self, error: ApiError) -> Event:
        """Return the last event of a response that fails."""
        if not self.has_started:
            return ErrorEvent(self._next(), error.code, error.message, error.param)
        return Failed(self._next(), self.failed_response(error))

    def _next(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _take(self, event: GenerationEvent, found: list[Event]) -> None:
        if isinstance(event, TextDelta):
            self._write(event, found)
        elif isinstance(event, ReasoningDelta):
            item = self._open
            if item is None or not item.is_reasoning:
                item = self._begin(_OpenItem(self._new_id("rs_"), is_reasoning=True), found)
            item.pieces.append(event.text)
            found.append(ReasoningPiece(self._next(), item.id, item.index, 0, event.text))
        elif isinstance(event, ToolCallArguments):
            self._add_arguments(event.text, found)
        elif isinstance(event, ToolCallStart):
            is_custom = event.name in self._custom_tools
            self._begin(_OpenItem(self._new_id("ctc_" if is_custom else "fc_"), call=event, is_custom=is_custom), found)
        elif isinstance(event, ChoiceEnd):
            self._end_choice(event, found)
        elif isinstance(event, GenerationStart):
            found.append(Created(self._next(), self._response))
            found.append(InProgress(self._next(), self._response))
        elif isinstance(event, UsageEnd):
            self._usage = _usage(event)

    def _write(self, event: TextDelta, found: list[Event]) -> None:
        item = self._open
        if item is None or not item.is_message:
            item = self._begin(_OpenItem(self._new_id("msg_")), found)
        logprobs = self._logprobs_of(event.positions)
        item.pieces.append(event.text)
        item.logprobs += logprobs
        self._num_logprobs += len(logprobs)
        found.append(TextPiece(self._next(), item.id, item.index, 0, event.text, logprobs))

    def _logprobs_of(self, positions: list[Position] | None) -> list[Any]:
        # Encoded once, because up to five events and the stored response contain them.
        return encoded(self._logprobs.chat(positions).content) if self._logprobs is not None and positions else []

    def _add_arguments(self, text: str, found: list[Event]) -> None:
        item = self._open
        if item is not None and item.call is not None:
            item.pieces.append(text)
            if not item.is_custom:  # the input of a custom tool is known only when its JSON arguments are complete
                found.append(ArgumentsPiece(self._next(), item.id, item.index, text))

    def _begin(self, item: _OpenItem, found: list[Event]) -> _OpenItem:
        self._close("completed", found)
        item.index = len(self._output)
        self._open = item
        found.append(ItemAdded(self._next(), item.index, item.item("in_progress")))
        if item.call is None:
            part = ReasoningText("") if item.is_reasoning else OutputText("", [], [])
            found.append(PartAdded(self._next(), item.id, item.index, 0, part))
        return item

    def _close(self, status: ItemStatus, found: list[Event]) -> None:
        item = self._open
        if item is None:
            return
        self._open = None
        text = "".join(item.pieces)
        if item.is_custom:
            custom_input = item.custom_input()
            found.append(CustomInputPiece(self._next(), item.id, item.index, custom_input))
            found.append(CustomInputDone(self._next(), item.id, item.index, custom_input))
        elif item.call is not None:
            found.append(ArgumentsDone(self._next(), item.id, item.index, item.call.name, text))
        elif item.is_reasoning:
            found.append(ReasoningDone(self._next(), item.id, item.index, 0, text))
            found.append(PartDone(self._next(), item.id, item.index, 0, ReasoningText(text)))
        else:
            found.append(TextDone(self._next(), item.id, item.index, 0, text, item.logprobs))
            found.append(PartDone(self._next(), item.id, item.index, 0, OutputText(text, [], item.logprobs)))
        done = item.item(status)
        self._output.append(done)
        found.append(ItemDone(self._next(), item.index, done))

    def _end_choice(self, event: ChoiceEnd, found: list[Event]) -> None:
        is_cut = event.finish_reason == "length"
        if self._open is None and not self._output and not is_cut:
            self._begin(_OpenItem(self._new_id("msg_")), found)  # an empty answer is still a message
        item = self._open
        is_whole_call = item is not None and item.call is not None and is_json("".join(item.pieces))
        self._close("incomplete" if is_cut and not is_whole_call else "completed", found)
        self._end = event


def _usage(end: UsageEnd) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=end.num_prompt,
        input_tokens_details=InputTokens(end.num_cached),
        output_tokens=end.num_completion,
        output_tokens_details=ReasoningTokens(end.num_reasoning),
        total_tokens=end.num_prompt + end.num_completion,
    )
