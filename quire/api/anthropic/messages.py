"""Request bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from quire.api.anthropic.blocks import AssistantMessage, CacheControl, Messages, Texts, ToolUseBlock
from quire.api.decode import Body, BodyError, Part, check_depth
from quire.api.field_values import show_names
from quire.api.openai.chat import MAX_SCHEMA_BYTES, MAX_TOOLS
from quire.api.openai.shared import MAX_STOP_STRINGS, MAX_TOKEN_ID, Name, StopString
from quire.api.refusal import Refusal, always, unless
from quire.api.unsupported_params import refusals_of_others
from quire.contracts.constraint import MAX_DEPTH as MAX_SCHEMA_DEPTH

ToolName = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,128}$")]
_SKIPPED_TOOLS = re.compile(r"(web_search|web_fetch|tool_search_tool_\w+)_\d{8}")
"""Types of tools that only the vendor runs, and that coding agents include by default."""


class Tool(Part, kw_only=True):
    """A function that the model may call; input_schema is a JSON schema."""

    name: ToolName
    input_schema: Annotated[dict[str, Any], Meta(description="Needed but for tools that are left out.")] | None = None
    description: str | None = None
    type: (
        Annotated[
            str,
            Meta(
                max_length=64,
                description="'custom', the default. Tools of the types web_search_*, web_fetch_* and tool_search_tool_* are "
                "left out, and named in x-quire-ignored-params.",
            ),
        ]
        | None
    ) = None
    strict: Annotated[bool, Meta(description="true: calls have an input of the schema.")] | None = None
    cache_control: CacheControl | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {
            "input_examples": always("is not supported; put examples into the description"),
            "defer_loading": unless(False, reason="tool search is not supported; leave it out"),
            "allowed_callers": unless(["direct"], reason="calling tools from code is not supported; it may be ['direct']"),
        }

    @property
    def is_skipped(self) -> bool:
        """Whether the tool is ignored."""
        return self.type is not None and _SKIPPED_TOOLS.fullmatch(self.type) is not None

    def __post_init__(self) -> None:
        if self.input_schema is None:
            return
        check_depth(self.input_schema, MAX_SCHEMA_DEPTH, "input_schema")
        size = len(msgspec.json.encode(self.input_schema))
        if size > MAX_SCHEMA_BYTES:
            raise ValueError(f"input_schema may have {MAX_SCHEMA_BYTES} bytes, got {size}")


class ToolChoiceAuto(msgspec.Struct, tag_field="type", tag="auto", kw_only=True):
    """The model may call tools; disable_parallel_tool_use ends the response after the first call."""

    disable_parallel_tool_use: bool | None = None


class ToolChoiceAny(msgspec.Struct, tag_field="type", tag="any", kw_only=True):
    """The model must call a tool, exactly one with disable_parallel_tool_use."""

    disable_parallel_tool_use: bool | None = None


class ToolChoiceTool(msgspec.Struct, tag_field="type", tag="tool", kw_only=True):
    """The model must call a given tool, exactly once with disable_parallel_tool_use."""

    name: ToolName
    disable_parallel_tool_use: bool | None = None


class ToolChoiceNone(msgspec.Struct, tag_field="type", tag="none", kw_only=True):
    """No tools are passed to the model."""

    disable_parallel_tool_use: bool | None = None


ToolChoice = ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | ToolChoiceNone


class ThinkingEnabled(msgspec.Struct, tag_field="type", tag="enabled", kw_only=True):
    """Enables reasoning. A chat template with effort levels maps the budget to one of them; it is not enforced as a limit."""

    budget_tokens: Annotated[int, Meta(ge=1024, le=MAX_TOKEN_ID)]
    display: Annotated[Literal["summarized", "omitted"], Meta(description="Shown reasoning is shown in full.")] | None = None


class ThinkingDisabled(msgspec.Struct, tag_field="type", tag="disabled", kw_only=True):
    """Disables reasoning."""


class ThinkingAdaptive(msgspec.Struct, tag_field="type", tag="adaptive", kw_only=True):
    """The chat template, or output_config.effort, decides about reasoning."""

    display: Annotated[Literal["summarized", "omitted"], Meta(description="Shown reasoning is shown in full.")] | None = None


Thinking = ThinkingEnabled | ThinkingDisabled | ThinkingAdaptive


class OutputFormat(msgspec.Struct, tag_field="type", tag="json_schema", kw_only=True):
    """JSON that matches a schema."""

    schema: dict[str, Any] | bool


class OutputConfig(Part, kw_only=True):
    """Reasoning effort, as the chat template defines it, and the format of the output."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {"task_budget": always("is not supported; use max_tokens")}


class RequestMetadata(msgspec.Struct, kw_only=True):
    """Accepted and ignored."""

    user_id: Annotated[str, Meta(max_length=512)] | None = None


class PromptFields(Body, kw_only=True):
    """Fields that determine the prompt."""

    model: Annotated[Name, Meta(description="One of GET /v1/models.")]
    messages: Messages
    system: Texts | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Annotated[Thinking, Meta(description="Default: as the chat template has it.")] | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: (
        Annotated[dict[str, Any], Meta(description="Edits that keep all. Accepted and not needed: all is kept.")] | None
    ) = None
    speed: Annotated[Literal["standard", "fast"], Meta(description="Accepted and not used.")] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {
            "tools": _refuse_tools,
            "output_format": always("is no longer supported; use output_config.format"),
            "mcp_servers": unless([], reason="this server calls no MCP servers; give their tools as tools", shows_value=False),
            "inference_geo": unless("global", reason="is not supported; leave it out"),
            **{name: always("is not supported; leave it out") for name in ("container", "compaction", "thread")},
            "context_management": _refuse_context_management,
        }

    def check(self) -> None:
        """Check constraints between fields."""
        names: list[str] = []
        for position, tool in enumerate(self.tools or ()):
            if tool.is_skipped:
                continue
            if tool.input_schema is None:
                where = f"tools[{position}].input_schema"
                raise BodyError(f"{where} is required", where, "missing_required_parameter")
            if tool.name in names:
                raise BodyError(f"tools: two have the name {tool.name!r}", f"tools[{position}].name")
            names.append(tool.name)
        self._check_constraints(names)
        last = self.messages[-1]
        if isinstance(last, AssistantMessage) and any(isinstance(block, ToolUseBlock) for block in last.content):
            where = f"messages[{len(self.messages) - 1}]"
            raise BodyError(f"{where}: the last message has tool_use blocks without the tool_result blocks after them", where)

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that are not ignored."""
        return [tool for tool in self.tools or () if not tool.is_skipped]

    def ignored_parts(self) -> Mapping[str, str]:
        """Return the ignored tools, each with its type, context edits that keep everything, and speed."""
        tools = enumerate(self.tools or ())
        parts = {f"tools[{position}]": f"tools[{position}].{tool.type}" for position, tool in tools if tool.is_skipped}
        if self.context_management is not None:
            parts["context_management"] = "context_management"
        if self.speed == "fast":
            parts["speed"] = "speed"
        return parts

    def output_schemas(self) -> Iterator[tuple[str, object]]:
        """See Body."""
        if self.output_config is not None and self.output_config.format is not None:
            yield "output_config.format.schema", self.output_config.format.schema
        for at, tool in enumerate(self.tools or ()):
            if tool.is_skipped:
                continue
            if tool.strict or isinstance(self.tool_choice, ToolChoiceAny | ToolChoiceTool):
                yield f"tools[{at}].input_schema", tool.input_schema

    def _check_constraints(self, names: list[str]) -> None:
        choice = self.tool_choice
        if isinstance(choice, ToolChoiceAny | ToolChoiceTool) and not names:
            raise BodyError("tool_choice: needs tools", "tool_choice")
        if isinstance(choice, ToolChoiceTool) and choice.name not in names:
            raise BodyError(
                f"tool_choice.name: there is no tool {choice.name!r}; there are {show_names(names)}", "tool_choice.name"
            )
        has_format = self.output_config is not None and self.output_config.format is not None
        if has_format and isinstance(self.messages[-1], AssistantMessage):
            raise BodyError(
                "output_config.format: cannot be used with a last message of the assistant, which the answer would go on with",
                "output_config.format",
            )


class CountTokensRequest(PromptFields, kw_only=True):
    """A conversation whose tokens are to be counted."""


class MessagesRequest(PromptFields, kw_only=True):
    """A conversation to be continued."""

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {**refusals_of_others(cls.__struct_encode_fields__), **super().refusals()}

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKEN_ID)]
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1, description="0 takes the most likely token.")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID, description="0: all tokens.")] | None = None
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


def _refuse_tools(value: Any) -> str | None:
    for tool in value if isinstance(value, list) else ():  # pyright: ignore[reportUnknownVariableType]
        kind = _member(tool, "type")
        if isinstance(kind, str) and kind != "custom" and not _SKIPPED_TOOLS.fullmatch(kind):
            return f"this server runs no tools of its own, such as {kind[:100]!r}; only tools with name and input_schema are"
    return None


def _refuse_context_management(value: Any) -> str | None:
    edits = _member(value, "edits")
    is_known = isinstance(value, dict) and value.keys() <= {"edits"} and (edits is None or isinstance(edits, list))  # pyright: ignore[reportUnknownMemberType]
    if is_known and all(map(_keeps_all, edits or ())):
        return None
    return "is not supported, but for edits of the type clear_thinking_* with keep 'all', which change nothing; leave it out"


def _keeps_all(edit: Any) -> bool:
    kind, keep = _member(edit, "type"), _member(edit, "keep")
    return isinstance(kind, str) and kind.startswith("clear_thinking_") and keep in ("all", {"type": "all"})


def _member(value: Any, name: str) -> Any:
    return cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None
