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
    """Marks the end of a prefix to be cached. Accepted and not needed: prefixes are cached by themselves."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(msgspec.Struct, tag_field="type", tag="text", kw_only=True):
    """Text."""

    text: str
    cache_control: CacheControl | None = None


class SoleTextBlock(msgspec.Struct, kw_only=True):
    """Text where nothing else may stand. The type is a field here: of a tag that has no alternatives none is demanded."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", kw_only=True):
    """Reasoning of an earlier answer; it is used where the signature is this server's own, else left out."""

    thinking: str
    signature: str


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking", kw_only=True):
    """Reasoning that only its maker can read. Accepted and left out."""

    data: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", kw_only=True):
    """A tool call of an earlier answer."""

    id: CallId
    name: CallName
    input: dict[str, Any]
    cache_control: CacheControl | None = None

    def __post_init__(self) -> None:
        check_depth(self.input, MAX_DEPTH, "input")


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", kw_only=True):
    """What a tool returned. With is_error the model is shown the text after "Error: "."""

    tool_use_id: CallId
    content: str | Annotated[list[SoleTextBlock], Meta(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Texts = str | Annotated[list[SoleTextBlock], Meta(max_length=MAX_PARTS)]
UserBlock = TextBlock | ToolResultBlock
AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock


class UserMessage(msgspec.Struct, tag_field="role", tag="user"):
    """What the user says, and what tools returned."""

    content: str | Annotated[list[UserBlock], Meta(max_length=MAX_PARTS)]


class AssistantMessage(msgspec.Struct, tag_field="role", tag="assistant"):
    """An earlier answer; as the last message it is the beginning of the new one."""

    content: str | Annotated[list[AssistantBlock], Meta(max_length=MAX_PARTS)]


class SystemMessage(msgspec.Struct, tag_field="role", tag="system"):
    """Instructions in mid-conversation."""

    content: Texts


Message = UserMessage | AssistantMessage | SystemMessage
Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
