"""Request bodies of POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from quire.api.decode import Body, BodyError, Part, check_depth
from quire.api.field_values import show_names
from quire.api.openai.chat import MAX_SCHEMA_BYTES, MAX_TOOLS, check_limits
from quire.api.openai.responses_items import InputItems
from quire.api.openai.shared import (
    MAX_TOKEN_ID,
    NO_LIMIT,
    SERVICE_TIERS,
    CacheRetention,
    Limit,
    Metadata,
    Name,
    Penalty,
    Salt,
    ServiceTier,
    Stop,
)
from quire.api.refusal import Refusal, always, unless
from quire.api.unsupported_params import refusals_of_others
from quire.contracts.constraint import MAX_DEPTH as MAX_SCHEMA_DEPTH

MAX_INCLUDES = 32
Identifier = Annotated[str, Meta(max_length=512)]
_TOOL_NAME = "^[A-Za-z0-9_-]{1,64}$"
_INCLUDES = ("message.output_text.logprobs", "reasoning.encrypted_content")
_INCLUDES_WITHOUT_EFFECT = (
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
"""Concern items that no response here has; clients add them by default."""
_SKIPPED_TOOLS = ("web_search", "image_generation", "namespace", "tool_search", "local_shell", "shell", "apply_patch")
"""Types of tools that need the vendor's server or models, and that coding agents include in every request."""
CUSTOM_INPUT = "input"
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


class CustomFormat(msgspec.Struct, kw_only=True):
    """The input format of a custom tool."""

    type: Annotated[str, Meta(max_length=64, description="'text'; a tool with another format is left out.")]
    syntax: str | None = None
    definition: str | None = None


class FunctionTool(Part, kw_only=True):
    """A function with a JSON schema of parameters, or a custom tool, whose input is free text."""

    type: Annotated[
        str,
        Meta(
            max_length=64,
            description="'function' or 'custom'. Tools of the types web_search, image_generation, namespace, tool_search, "
            "local_shell, shell and apply_patch are left out, and named in x-quire-ignored-params.",
        ),
    ]
    name: Annotated[str, Meta(max_length=256, description=f"{_TOOL_NAME} of what the model may call.")] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[bool, Meta(description="true: calls have arguments of the schema.")] | None = None
    format: Annotated[CustomFormat, Meta(description="Of a custom tool; default: any text.")] | None = None

    @property
    def is_skipped(self) -> bool:
        """Whether the tool is ignored: it needs the vendor's server, or its input has a format of its own."""
        is_vendors = self.type in _SKIPPED_TOOLS or self.type.startswith("web_search_preview")
        return is_vendors or (self.is_custom and self.format is not None and self.format.type != "text")

    @property
    def is_custom(self) -> bool:
        """Whether its input is free text."""
        return self.type == "custom"

    @property
    def schema(self) -> dict[str, Any] | None:
        """The schema of its arguments; a custom tool is a function with one string."""
        return _CUSTOM_PARAMETERS if self.is_custom else self.parameters

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {
            "defer_loading": unless(False, reason="tool search is not supported; leave it out"),
            "allowed_callers": unless(["direct"], reason="calling tools from code is not supported; it may be ['direct']"),
        }

    def __post_init__(self) -> None:
        if self.parameters is None:
            return
        check_depth(self.parameters, MAX_SCHEMA_DEPTH, "parameters")
        size = len(msgspec.json.encode(self.parameters))
        if size > MAX_SCHEMA_BYTES:
            raise ValueError(f"parameters may have {MAX_SCHEMA_BYTES} bytes, got {size}")


class ChosenTool(msgspec.Struct, tag_field="type", tag="function"):
    """A tool that must or may be called."""

    name: Annotated[str, Meta(pattern=_TOOL_NAME)]


class ChosenCustomTool(msgspec.Struct, tag_field="type", tag="custom"):
    """A custom tool that must or may be called."""

    name: Annotated[str, Meta(pattern=_TOOL_NAME)]


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools", kw_only=True):
    """The tools that may be called; with the mode "required" one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool | ChosenCustomTool], Meta(min_length=1, max_length=MAX_TOOLS)]


ToolChoice = Literal["none", "auto", "required"] | ChosenTool | ChosenCustomTool | AllowedTools


class Reasoning(Part, kw_only=True):
    """Reasoning effort. Summaries are not generated: the reasoning is returned in full."""

    effort: Annotated[str, Meta(max_length=32, description="As the chat template knows it.")] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {
            "context": unless("auto", reason="may be 'auto': the chat template decides which reasoning the model is shown"),
            "mode": unless("standard", reason="there is only 'standard'"),
        }


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    """Unconstrained text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    """A JSON object."""


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", kw_only=True):
    """JSON that matches a schema, enforced whether strict is true or not. The name and the description are ignored."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    schema: dict[str, Any] | bool
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    """Format and verbosity of the text."""

    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    """Options of streams."""

    include_obfuscation: Literal[False] | None = None


class ChosenConversation(msgspec.Struct, kw_only=True):
    """A stored conversation."""

    id: Identifier


class ResponsePrompt(Body, kw_only=True):
    """A conversation, possibly continuing a stored one, and the fields that the chat template gets."""

    model: Annotated[Name, Meta(description="One of GET /v1/models.")]
    input: str | InputItems
    instructions: Annotated[str, Meta(description="A system message; not taken over from the previous response.")] | None = None
    previous_response_id: Annotated[Identifier, Meta(description="A stored response to go on from.")] | None = None
    conversation: (
        Annotated[Identifier, Meta(description="A stored conversation to go on from; the answer is appended to it.")]
        | ChosenConversation
        | None
    ) = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {
            "truncation": unless("disabled", reason="is not supported; shorten the input"),
            "tool_choice": _refuse_tool_choice,
            "text": _refuse_text,
            "prompt": always("stored prompts are not supported; send instructions and input"),
        }

    def check(self) -> None:
        """Check constraints between fields."""
        for position, item in enumerate(() if isinstance(self.input, str) else self.input):
            item.check(f"input[{position}]")
        if not self.input and self.previous_response_id is None and self.conversation is None:
            raise BodyError("input: is empty", "input")
        if self.conversation is not None and self.previous_response_id is not None:
            raise BodyError("conversation: cannot be used together with previous_response_id; send one of them", "conversation")
        self._check_tools()

    def output_schemas(self) -> Iterator[tuple[str, object]]:
        """See Body."""
        if self.text is not None and isinstance(self.text.format, JsonSchemaFormat):
            yield "text.format.schema", self.text.format.schema
        for at, tool in enumerate(self.tools or ()):
            if tool.is_skipped or tool.type == "custom":
                continue
            if tool.strict or self.tool_choice == "required" or tool.name in self.chosen_tools:
                yield f"tools[{at}].parameters", tool.parameters

    def _check_tools(self) -> None:
        names: list[str] = []
        for position, tool in enumerate(self.tools or ()):
            where = f"tools[{position}]"
            if tool.is_skipped:
                continue
            if tool.type not in ("function", "custom"):
                raise BodyError(
                    f"{where}.type: this server runs no tools of its own, such as {tool.type!r}; only 'function' and 'custom' "
                    "are supported",
                    f"{where}.type",
                    "unsupported_value",
                )
            if tool.name is None:
                raise BodyError(f"{where}.name is required", f"{where}.name", "missing_required_parameter")
            if not re.match(_TOOL_NAME, tool.name):
                raise BodyError(f"{where}.name: must match {_TOOL_NAME}, got {tool.name[:100]!r}", f"{where}.name")
            if tool.name in names:
                raise BodyError(f"tools: two have the name {tool.name!r}", f"{where}.name")
            names.append(tool.name)
        for name in self.chosen_tools:
            if name not in names:
                raise BodyError(f"tool_choice: there is no tool {name!r}; there are {show_names(names)}", "tool_choice")
        if self.tool_choice == "required" and not names:
            raise BodyError("tool_choice: needs tools", "tool_choice")

    @property
    def conversation_id(self) -> str | None:
        """The conversation to go on from; None for none."""
        return self.conversation.id if isinstance(self.conversation, ChosenConversation) else self.conversation

    @property
    def chosen_tools(self) -> tuple[str, ...]:
        """The tools that tool_choice names."""
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return tuple(tool.name for tool in choice.tools)
        return (choice.name,) if isinstance(choice, ChosenTool | ChosenCustomTool) else ()

    @property
    def forced_tools(self) -> tuple[str, ...]:
        """The names of the tools of which one must be called; empty: the model decides."""
        choice = self.tool_choice
        if isinstance(choice, ChosenTool | ChosenCustomTool):
            return self.chosen_tools
        is_required = choice == "required" or (isinstance(choice, AllowedTools) and choice.mode == "required")
        return tuple(tool.name or "" for tool in self.shown_tools) if is_required else ()

    @property
    def shown_tools(self) -> list[FunctionTool]:
        """The tools that the model sees: those that it may call."""
        if self.tool_choice == "none":
            return []
        names = self.chosen_tools if isinstance(self.tool_choice, AllowedTools) else None
        return [tool for tool in self.offered_tools if names is None or tool.name in names]

    @property
    def offered_tools(self) -> list[FunctionTool]:
        """The tools that are not ignored."""
        return [tool for tool in self.tools or () if not tool.is_skipped]

    def ignored_parts(self) -> Mapping[str, str]:
        """Return the ignored tools, each with its type."""
        tools = enumerate(self.tools or ())
        return {f"tools[{position}]": f"tools[{position}].{tool.type}" for position, tool in tools if tool.is_skipped}


class ResponsesRequest(ResponsePrompt, kw_only=True):
    """A conversation to be continued."""

    store: Annotated[bool, Meta(description="Keep the response for 30 days. Default true.")] | None = None
    max_output_tokens: Annotated[Limit, Meta(description="Default, and -1: what the context has left.")] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, description="Of hosted tools, which there are none of.")] | None = None
    include: Annotated[list[Annotated[str, Meta(max_length=128)]], Meta(max_length=MAX_INCLUDES)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2, description="0 takes the most likely token.")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKEN_ID, description="0 and -1: all tokens.")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    stop: Stop | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    cache_salt: Annotated[Salt, Meta(description="Keeps the prefix cache of these requests apart.")] | None = None
    background: Annotated[bool, Meta(description="Answer at once; the response is asked for by its id.")] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: Metadata | None = None
    service_tier: ServiceTier | None = None
    user: Identifier | None = None
    safety_identifier: Identifier | None = None
    prompt_cache_key: Identifier | None = None
    prompt_cache_retention: CacheRetention | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {
            **refusals_of_others(cls.__struct_encode_fields__),
            **ResponsePrompt.refusals(),
            "service_tier": SERVICE_TIERS,
            "context_management": unless([], reason="is not supported; leave it out"),
            "moderation": always("is not supported; leave it out"),
        }

    def check(self) -> None:
        """Check constraints between fields."""
        super().check()
        if self.stream_options is not None and not self.stream:
            raise BodyError("stream_options: can only be used with stream true", "stream_options")
        if self.background and self.stream:
            raise BodyError("stream: a response in the background is not streamed; ask for it by its id", "stream")
        if self.background and not self.is_stored:
            raise BodyError("background: needs a response that is stored; leave store out", "background")
        check_limits(self, "max_output_tokens")
        for position, name in enumerate(self.include or ()):
            if name not in (*_INCLUDES, *_INCLUDES_WITHOUT_EFFECT):
                param = f"include[{position}]"
                raise BodyError(f"{param}: may be one of {', '.join(_INCLUDES)}, got {name!r}", param, "unsupported_value")

    def ignored_parts(self) -> Mapping[str, str]:
        """Return the ignored tools, and `include` entries without effect."""
        include = [(f"include[{position}]", name) for position, name in enumerate(self.include or ())]
        others = {path: f"{path}.{name}" for path, name in include if name in _INCLUDES_WITHOUT_EFFECT}
        return {**super().ignored_parts(), **others}

    @property
    def limit(self) -> int | None:
        """The limit of the output; None without one."""
        return None if self.max_output_tokens == NO_LIMIT else self.max_output_tokens

    @property
    def is_stored(self) -> bool:
        """Whether the response is to be kept."""
        return self.store is not False

    @property
    def has_logprobs(self) -> bool:
        """Whether log probabilities of the generated tokens are requested."""
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)


def _refuse_tool_choice(value: Any) -> str | None:
    kind = _member(value, "type")
    if not isinstance(kind, str) or kind in ("function", "custom", "allowed_tools"):
        return None
    return f"there is no {kind[:100]!r} here; it may be 'none', 'auto', 'required', a function, a custom tool, or allowed_tools"


def _refuse_text(value: Any) -> str | None:
    if _member(_member(value, "format"), "type") == "grammar":
        return "the format can be 'text', 'json_object' or 'json_schema'; structured_outputs.grammar is of /v1/chat/completions"
    if _member(value, "verbosity") in ("low", "high"):
        return "verbosity is not supported; say in the instructions how long the answer is to be"
    return None


def _member(value: Any, name: str) -> Any:
    return cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None
