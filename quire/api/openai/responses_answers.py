"""Responses and stream events of the Responses API, with the fields in its order."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from quire.api.openai.answers import ChatLogprob, ReasoningTokens
from quire.api.openai.responses_items import OutputItem, OutputText, ReasoningText

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputTokens(msgspec.Struct):
    """input_tokens_details; cache writes are free and not counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """The token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class EchoedReasoning(msgspec.Struct):
    """The requested reasoning options."""

    effort: str | None
    summary: str | None


class ConversationRef(msgspec.Struct):
    """The conversation that a response continues."""

    id: str


class Response(msgspec.Struct, kw_only=True):
    """A response in any state; most fields repeat the request."""

    id: str
    object: str = "response"
    created_at: int
    status: ResponseStatus
    background: bool = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: ConversationRef | None = None
    prompt_cache_key: str | None
    reasoning: EchoedReasoning
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, dict[str, Any]]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


class DeletedResponse(msgspec.Struct):
    """The response to a deletion."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputTokenCount(msgspec.Struct):
    """The number of tokens of the prompt."""

    input_tokens: int
    object: str = "response.input_tokens"


class ItemList(msgspec.Struct):
    """A page of the items of an input."""

    object: str
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Event(msgspec.Struct, tag_field="type"):
    """Base of the events; they are numbered from 0 in the order of sending."""

    sequence_number: int


class Created(Event, tag="response.created"):
    """The first event."""

    response: Response


class InProgress(Event, tag="response.in_progress"):
    """The second event."""

    response: Response


class ItemAdded(Event, tag="response.output_item.added"):
    """An item begins, empty."""

    output_index: int
    item: OutputItem


class ItemDone(Event, tag="response.output_item.done"):
    """An item is complete."""

    output_index: int
    item: OutputItem


class PartEvent(Event):
    """Base of the events of a part of an item."""

    item_id: str
    output_index: int
    content_index: int


class PartAdded(PartEvent, tag="response.content_part.added"):
    """A part of an item begins, empty."""

    part: OutputText | ReasoningText


class PartDone(PartEvent, tag="response.content_part.done"):
    """A part of an item is complete."""

    part: OutputText | ReasoningText


class TextPiece(PartEvent, tag="response.output_text.delta"):
    """A delta of a text."""

    delta: str
    logprobs: list[ChatLogprob]


class TextDone(PartEvent, tag="response.output_text.done"):
    """A complete text."""

    text: str
    logprobs: list[ChatLogprob]


class ReasoningPiece(PartEvent, tag="response.reasoning_text.delta"):
    """A delta of the reasoning."""

    delta: str


class ReasoningDone(PartEvent, tag="response.reasoning_text.done"):
    """The complete reasoning of an item."""

    text: str


class ArgumentsPiece(Event, tag="response.function_call_arguments.delta"):
    """A delta of a call's arguments."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event, tag="response.function_call_arguments.done"):
    """The complete arguments of a call."""

    item_id: str
    output_index: int
    name: str
    arguments: str


class CustomInputPiece(Event, tag="response.custom_tool_call_input.delta"):
    """A delta of the input of a custom tool call."""

    item_id: str
    output_index: int
    delta: str


class CustomInputDone(Event, tag="response.custom_tool_call_input.done"):
    """The complete input of a custom tool call."""

    item_id: str
    output_index: int
    input: str


class Completed(Event, tag="response.completed"):
    """The last event of a completed response."""

    response: Response


class Incomplete(Event, tag="response.incomplete"):
    """The last event of a truncated response."""

    response: Response


class Failed(Event, tag="response.failed"):
    """The last event of a failed response."""

    response: Response


class ErrorEvent(Event, tag="error"):
    """The only event of a response that failed before it began."""

    code: str | None
    message: str
    param: str | None
