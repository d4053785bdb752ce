"""Responses and stream events of the Anthropic API, with the fields in its order."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class ThinkingTokens(msgspec.Struct):
    """output_tokens_details."""

    thinking_tokens: int


class Usage(msgspec.Struct, omit_defaults=True):
    """The token counts of a request; input_tokens excludes tokens that were read from the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | None = None
    service_tier: str | None = None


class Text(msgspec.Struct, tag_field="type", tag="text"):
    """A text block."""

    text: str


class Thinking(msgspec.Struct, tag_field="type", tag="thinking"):
    """A reasoning block."""

    thinking: str
    signature: str


class ToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A tool call."""

    id: str
    name: str
    input: Any


Block = Text | Thinking | ToolUse


class Message(msgspec.Struct, tag_field="type", tag="message"):
    """A complete response."""

    id: str
    role: str
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Usage


class TextPiece(msgspec.Struct, tag_field="type", tag="text_delta"):
    """A delta of a text block."""

    text: str


class ThinkingPiece(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """A delta of a reasoning block."""

    thinking: str


class SignaturePiece(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """The signature of a reasoning block, sent at its end."""

    signature: str


class InputPiece(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """A delta of the JSON of a tool call's input."""

    partial_json: str


Piece = TextPiece | ThinkingPiece | SignaturePiece | InputPiece


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """The first event: the message without its content."""

    message: Message


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: Block


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """A delta of the block."""

    index: int
    delta: Piece


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """The block is complete."""

    index: int


class Stop(msgspec.Struct):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """Why the message ended, and its total usage."""

    delta: Stop
    usage: Usage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event."""


StreamEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class TokenCount(msgspec.Struct):
    """The response to a request to count tokens."""

    input_tokens: int
