"""The content of messages of the Anthropic API: blocks of text, thinking, tool use and tool results."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.api.decode import check_depth
from quire.api.openai.chat import MAX_MESSAGES, MAX_PARTS, CallName
from quire.api.openai.shared import MAX_DEPTH

CallId = Annotated[str, Meta(min_length=1, max_length=256)]


class CacheControl(msgspec.Struct, kw_only=True):
    """Marks the end of a prefix to be cached. Accepted without effect: prefixes are cached automatically."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(msgspec.Struct, tag_field="type", tag="text", kw_only=True):
    """Text."""

    text: str
    cache_control: CacheControl | None = None


class SoleTextBlock(msgspec.Struct, kw_only=True):
    """Text where no other block is allowed. The type is a field: msgspec does not require the tag of a type without
    alternatives."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", kw_only=True):
    """Reasoning of an earlier response; used if the signature is this server's own, else ignored."""

    thinking: str
    signature: str


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking", kw_only=True):
    """Encrypted reasoning of another vendor. Accepted and ignored."""

    data: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", kw_only=True):
    """A tool call of an earlier response."""

    id: CallId
    name: CallName
    input: dict[str, Any]
    cache_control: CacheControl | None = None

    def __post_init__(self) -> None:
        check_depth(self.input, MAX_DEPTH, "input")


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", kw_only=True):
    """A tool's output. With is_error the model sees the text with the prefix "Error: "."""

    tool_use_id: CallId
    content: str | Annotated[list[SoleTextBlock], Meta(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Texts = str | Annotated[list[SoleTextBlock], Meta(max_length=MAX_PARTS)]
UserBlock = TextBlock | ToolResultBlock
AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock


class UserMessage(msgspec.Struct, tag_field="role", tag="user"):
    """A user's message, or tool results."""

    content: str | Annotated[list[UserBlock], Meta(max_length=MAX_PARTS)]


class AssistantMessage(msgspec.Struct, tag_field="role", tag="assistant"):
    """An earlier response; as the last message it is the beginning of the new one."""

    content: str | Annotated[list[AssistantBlock], Meta(max_length=MAX_PARTS)]


class SystemMessage(msgspec.Struct, tag_field="role", tag="system"):
    """Instructions within the conversation."""

    content: Texts


Message = UserMessage | AssistantMessage | SystemMessage
Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
