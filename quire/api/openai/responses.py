"""The bodies of POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from quire.api.decode import Body, BodyError, Part, check_depth
from quire.api.elsewhere import refusals_of_others
from quire.api.openai.chat import MAX_SCHEMA_BYTES, MAX_TOOLS
from quire.api.openai.responses_items import InputItems
from quire.api.openai.shared import (
    MAX_TOKEN_ID,
    SERVICE_TIERS,
    Metadata,
    Name,
    Penalty,
    Salt,
    ServiceTier,
    Stop,
)
from quire.api.refusal import Refusal, always, unless
from quire.contracts.constraint import MAX_DEPTH as MAX_SCHEMA_DEPTH

MAX_INCLUDES = 32
Identifier = Annotated[str, Meta(max_length=512)]
_TOOL_NAME = "^[A-Za-z0-9_-]{1,64}$"
_INCLUDES = ("message.output_text.logprobs", "reasoning.encrypted_content")


class FunctionTool(Part, kw_only=True):
    """A function that the model may call; parameters is a JSON schema."""

    type: Annotated[str, Meta(max_length=64, description="'function': the server runs no tools of its own.")]
    name: Annotated[str, Meta(pattern=_TOOL_NAME)] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[bool, Meta(description="true: calls have arguments of the schema.")] | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {
            "defer_loading": unless(False, reason="there is no search of tools here; leave it out"),
            "allowed_callers": unless(["direct"], reason="there is no code that calls tools here; it may be ['direct']"),
        }

    def __post_init__(self) -> None:
        if self.parameters is None:
            return
        check_depth(self.parameters, MAX_SCHEMA_DEPTH, "parameters")
        size = len(msgspec.json.encode(self.parameters))
        if size > MAX_SCHEMA_BYTES:
            raise ValueError(f"parameters may have {MAX_SCHEMA_BYTES} bytes, got {size}")


class ChosenTool(msgspec.Struct, tag_field="type", tag="function"):
    """A tool that is to be called, or may be."""

    name: Annotated[str, Meta(pattern=_TOOL_NAME)]


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools", kw_only=True):
    """The tools that may be called, of which one has to be where the mode is "required"."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Meta(min_length=1, max_length=MAX_TOOLS)]


ToolChoice = Literal["none", "auto", "required"] | ChosenTool | AllowedTools


class Reasoning(Part, kw_only=True):
    """How much the model is to reason. A summary is not made: the reasoning is given in full."""

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
    """Any text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    """A JSON object."""


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", kw_only=True):
    """JSON of a schema, which is enforced whether strict is true or not. The name and the description are not used."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    schema: dict[str, Any] | bool
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    """The form of the text, and how long it is to be."""

    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    """Options of streams."""

    include_obfuscation: Literal[False] | None = None


class ResponsePrompt(Body, kw_only=True):
    """A conversation, perhaps one that the server has stored, and what of a request the chat template is told."""

    model: Annotated[Name, Meta(description="One of GET /v1/models.")]
    input: str | InputItems
    instructions: Annotated[str, Meta(description="A system message; not taken over from the previous response.")] | None = None
    previous_response_id: Annotated[Identifier, Meta(description="A stored response to go on from.")] | None = None
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
            "prompt": always("there are no stored prompts; send instructions and input"),
            "conversation": always("is not supported; use previous_response_id"),
        }

    def check(self) -> None:
        """Check what lies between the fields."""
        for position, item in enumerate(() if isinstance(self.input, str) else self.input):
            item.check(f"input[{position}]")
        if not self.input and self.previous_response_id is None:
            raise BodyError("input: is empty", "input")
        self._check_tools()

    def output_schemas(self) -> Iterator[tuple[str, object]]:
        """See Body."""
        if self.text is not None and isinstance(self.text.format, JsonSchemaFormat):
            yield "text.format.schema", self.text.format.schema
        for at, tool in enumerate(self.tools or ()):
            if tool.strict or self.tool_choice == "required" or tool.name in self.chosen_tools:
                yield f"tools[{at}].parameters", tool.parameters

    def _check_tools(self) -> None:
        names: list[str] = []
        for position, tool in enumerate(self.tools or ()):
            where = f"tools[{position}]"
            if tool.type != "function":
                raise BodyError(
                    f"{where}.type: this server runs no tools of its own, such as {tool.type!r}; only 'function' is supported",
                    f"{where}.type",
                    "unsupported_value",
                )
            if tool.name is None:
                raise BodyError(f"{where}.name is required", f"{where}.name", "missing_required_parameter")
            if tool.name in names:
                raise BodyError(f"tools: two have the name {tool.name!r}", f"{where}.name")
            names.append(tool.name)
        for name in self.chosen_tools:
            if name not in names:
                raise BodyError(f"tool_choice: there is no tool {name!r}", "tool_choice", "invalid_value")
        if self.tool_choice == "required" and not names:
            raise BodyError("tool_choice: needs tools", "tool_choice")

    @property
    def chosen_tools(self) -> tuple[str, ...]:
        """The tools that tool_choice names."""
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return tuple(tool.name for tool in choice.tools)
        return (choice.name,) if isinstance(choice, ChosenTool) else ()

    @property
    def forced_tools(self) -> tuple[str, ...]:
        """The names of the tools one of which has to be called; empty: the model decides."""
        choice = self.tool_choice
        if isinstance(choice, ChosenTool):
            return self.chosen_tools
        is_required = choice == "required" or (isinstance(choice, AllowedTools) and choice.mode == "required")
        return tuple(tool.name or "" for tool in self.shown_tools) if is_required else ()

    @property
    def shown_tools(self) -> list[FunctionTool]:
        """The tools that the model is shown: those that it may call."""
        if self.tool_choice == "none":
            return []
        names = self.chosen_tools if isinstance(self.tool_choice, AllowedTools) else None
        return [tool for tool in self.tools or () if names is None or tool.name in names]


class ResponsesRequest(ResponsePrompt, kw_only=True):
    """A conversation to be continued."""

    store: Annotated[bool, Meta(description="Keep the response for 30 days. Default true.")] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKEN_ID, description="Default: what the context has left.")] | None = (
        None
    )
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
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: Metadata | None = None
    service_tier: ServiceTier | None = None
    user: Identifier | None = None
    safety_identifier: Identifier | None = None
    prompt_cache_key: Identifier | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {
            **refusals_of_others(cls.__struct_encode_fields__),
            **ResponsePrompt.refusals(),
            "background": unless(False, reason="responses are not made in the background; leave it out"),
            "service_tier": SERVICE_TIERS,
            **{name: always("is not supported; leave it out") for name in ("context_management", "moderation")},
        }

    def check(self) -> None:
        """Check what lies between the fields."""
        super().check()
        if self.stream_options is not None and not self.stream:
            raise BodyError("stream_options: can only be used with stream true", "stream_options")
        for position, name in enumerate(self.include or ()):
            if name not in _INCLUDES:
                param = f"include[{position}]"
                raise BodyError(f"{param}: may be one of {', '.join(_INCLUDES)}, got {name!r}", param, "unsupported_value")

    @property
    def is_stored(self) -> bool:
        """Whether the response is to be kept."""
        return self.store is not False

    @property
    def has_logprobs(self) -> bool:
        """Whether the log probabilities of the answer's tokens are wanted."""
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)


def _refuse_tool_choice(value: Any) -> str | None:
    kind = _member(value, "type")
    if not isinstance(kind, str) or kind in ("function", "allowed_tools"):
        return None
    return f"there is no {kind[:100]!r} here; it may be 'none', 'auto', 'required', a function, or allowed_tools"


def _refuse_text(value: Any) -> str | None:
    if _member(_member(value, "format"), "type") == "grammar":
        return "the format can be 'text', 'json_object' or 'json_schema'; structured_outputs.grammar is of /v1/chat/completions"
    if _member(value, "verbosity") in ("low", "high"):
        return "verbosity is not supported; say in the instructions how long the answer is to be"
    return None


def _member(value: Any, name: str) -> Any:
    return cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None
