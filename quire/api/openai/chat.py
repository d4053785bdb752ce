"""Request body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from quire.api.decode import BodyError, Part, check_depth
from quire.api.field_values import show_names
from quire.api.openai.shared import (
    MAX_DEPTH,
    NO_LIMIT,
    SERVICE_TIERS,
    CacheRetention,
    Limit,
    Metadata,
    SamplingFields,
    ServiceTier,
)
from quire.api.refusal import Refusal, always, unless
from quire.api.unsupported_params import NO_REASONING, refusals_of
from quire.contracts.constraint import MAX_DEPTH as MAX_SCHEMA_DEPTH

MAX_MESSAGES = 4096
MAX_PARTS = 256
MAX_TOOLS = 256
MAX_SCHEMA_BYTES = 64 << 10

ToolName = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
CallName = Annotated[str, Meta(min_length=1, max_length=256)]


class ContentPart(msgspec.Struct):
    """A text part."""

    type: Literal["text"]
    text: str


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A text part of an earlier response."""

    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    """A refusal of an earlier response; the model sees it as text."""

    refusal: str


Texts = str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)]
AssistantTexts = str | Annotated[list[TextPart | RefusalPart], Meta(max_length=MAX_PARTS)]


class CalledFunction(msgspec.Struct):
    """The function that a model called; arguments is JSON as a string."""

    name: CallName
    arguments: str | dict[str, Any]

    def __post_init__(self) -> None:
        check_depth(self.arguments, MAX_DEPTH, "arguments")


class CalledTool(msgspec.Struct):
    """A tool call of an earlier response."""

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"


class DeveloperMessage(msgspec.Struct, tag_field="role", tag="developer", kw_only=True):
    """Instructions."""

    content: Texts
    name: str | None = None


class SystemMessage(msgspec.Struct, tag_field="role", tag="system", kw_only=True):
    """Instructions."""

    content: Texts
    name: str | None = None


class UserMessage(msgspec.Struct, tag_field="role", tag="user", kw_only=True):
    """A user's message."""

    content: Texts
    name: str | None = None


class AssistantMessage(Part, tag_field="role", tag="assistant", kw_only=True):
    """An earlier response; reasoning_content (or reasoning) may be sent back, and the chat template decides about its use."""

    content: AssistantTexts | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[CalledTool], Meta(max_length=MAX_TOOLS)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        goes_on = unless(False, reason="is not supported; continue_final_message goes on with the last message")
        return {
            "prefix": goes_on,
            "partial": goes_on,
            "function_call": always("is no longer supported; use tool_calls"),
            "audio": always("only text input is supported"),
        }


class ToolMessage(msgspec.Struct, tag_field="role", tag="tool", kw_only=True):
    """A tool's output."""

    content: Texts
    tool_call_id: str
    name: str | None = None


class FunctionMessage(msgspec.Struct, tag_field="role", tag="function", kw_only=True):
    """A function's output, in the old format."""

    content: str | None
    name: str


Message = DeveloperMessage | SystemMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage
Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class FunctionDefinition(msgspec.Struct, kw_only=True):
    """A function that the model may call; parameters is a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[bool, Meta(description="true: calls have arguments of the schema.")] | None = None

    def __post_init__(self) -> None:
        if self.parameters is None:
            return
        check_depth(self.parameters, MAX_SCHEMA_DEPTH, "parameters")
        size = len(msgspec.json.encode(self.parameters))
        if size > MAX_SCHEMA_BYTES:
            raise ValueError(f"parameters may have {MAX_SCHEMA_BYTES} bytes, got {size}")


class Tool(msgspec.Struct, kw_only=True):
    """A tool."""

    function: FunctionDefinition
    type: Literal["function"]


class ChosenFunction(msgspec.Struct):
    """The function that is to be called."""

    name: ToolName


class ChosenTool(msgspec.Struct, tag_field="type", tag="function"):
    """The tool that is to be called."""

    function: ChosenFunction


class AllowedTools(msgspec.Struct, kw_only=True):
    """The tools that may be called; with the mode "required" one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """A subset of the tools: the model sees only these."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | ChosenTool | AllowedChoice
Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
TemplateVariables = Annotated[dict[str, Any], Meta(description="More variables of the chat template.")]
ContinuesFinal = Annotated[bool, Meta(description="Go on with the last message.")]
RESERVED_VARIABLES = frozenset(("messages", "tools", "add_generation_prompt"))


class TemplateFields(Protocol):
    """Fields that are passed to the chat template."""

    tools: list[Tool] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


def check_limits(body: msgspec.Struct, *names: str) -> None:
    """Raise RequestError if a limit of output tokens is 0."""
    for name in names:
        if getattr(body, name) == 0:
            raise BodyError(f"{name}: must be at least 1, or -1 for no limit, got 0", name)


def check_template_fields(body: TemplateFields) -> None:
    """Check constraints between the template's fields. Raises RequestError."""
    variables = body.chat_template_kwargs or {}
    try:
        check_depth(variables, MAX_DEPTH, "chat_template_kwargs")
    except ValueError as error:
        raise BodyError(str(error), "chat_template_kwargs") from None
    for name in sorted(RESERVED_VARIABLES & variables.keys()):
        raise BodyError(f"chat_template_kwargs: {name} has a field of its own", f"chat_template_kwargs.{name}")
    if body.continue_final_message and body.add_generation_prompt:
        raise BodyError(
            "continue_final_message: cannot be used with add_generation_prompt, which begins a new message",
            "continue_final_message",
        )
    names = [tool.function.name for tool in body.tools or ()]
    for position, name in enumerate(names):
        if name in names[:position]:
            raise BodyError(f"tools: two have the name {name!r}", f"tools[{position}].function.name")


def check_tool_choice(choice: ToolChoice | None, tools: list[Tool] | None) -> None:
    """Check that the chosen tools exist. Raises RequestError."""
    if choice in (None, "none", "auto"):
        return
    if not tools:
        raise BodyError("tool_choice: needs tools", "tool_choice")
    known = [tool.function.name for tool in tools]
    for name in chosen_tools(choice):
        if name not in known:
            raise BodyError(f"tool_choice: there is no tool {name!r}; there are {show_names(known)}", "tool_choice")


def chosen_tools(choice: ToolChoice | None) -> tuple[str, ...]:
    """Return the names of the tools that a tool_choice names."""
    if isinstance(choice, AllowedChoice):
        return tuple(tool.function.name for tool in choice.allowed_tools.tools)
    return (choice.function.name,) if isinstance(choice, ChosenTool) else ()


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """A conversation to be continued."""

    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: ContinuesFinal | None = None
    chat_template_kwargs: TemplateVariables | None = None
    max_completion_tokens: Annotated[Limit, Meta(description="Default, and -1: what the context has left.")] | None = None
    max_tokens: Annotated[Limit, Meta(description="The old name of max_completion_tokens.")] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20, description="Needs logprobs.")] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Meta(max_length=32, description="As the chat template knows it.")] | None = None
    enable_thinking: Annotated[Literal[False], Meta(description="The same as reasoning_effort 'none'.")] | None = None
    think: Annotated[Literal[False], Meta(description="The same as reasoning_effort 'none'.")] | None = None
    thinking: Annotated[dict[str, Any], Meta(description='{"type": "disabled"}: as reasoning_effort "none".')] | None = None
    reasoning: Annotated[dict[str, Any], Meta(description='{"effort": "none"}: as reasoning_effort "none".')] | None = None
    include_reasoning: Annotated[bool, Meta(description="false leaves the reasoning out of the answer.")] | None = None
    echo: Annotated[bool, Meta(description="With continue_final_message: begin with that message.")] | None = None
    service_tier: ServiceTier | None = None
    metadata: Metadata | None = None
    store: Annotated[bool, Meta(description="Accepted and not used: chat completions are not stored.")] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention | None = None
    modalities: list[Literal["text"]] | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        old_functions = "is no longer supported; use tools and tool_choice"
        other_reasoning = {name: neutral for name, neutral in NO_REASONING.items() if name != "reasoning_effort"}
        return {
            **super().refusals(),
            **refusals_of(other_reasoning, ("reasoning_effort",)),
            "functions": unless([], reason=old_functions),
            "function_call": unless("auto", "none", reason=old_functions),
            "service_tier": SERVICE_TIERS,
            "chat_template": always("a request cannot bring its own chat template; chat_template_kwargs can set its variables"),
            "modalities": unless(["text"], reason="only text output is supported"),
            "web_search_options": always("web search is not supported; leave it out"),
            "verbosity": unless("medium", reason="is not supported; say in the messages how long the answer is to be"),
            **{name: always("is not supported; leave it out") for name in ("audio", "moderation")},
        }

    def check(self) -> None:
        """Check constraints between fields."""
        super().check()
        check_template_fields(self)
        if self.top_logprobs and not self.logprobs:
            raise BodyError("top_logprobs: needs logprobs true", "top_logprobs")
        check_limits(self, "max_completion_tokens", "max_tokens")
        self._check_reasoning()
        limit = self.max_output_tokens
        if self.min_tokens is not None and limit is not None and self.min_tokens > limit:
            raise BodyError(f"min_tokens: must be at most max_completion_tokens, {limit}, got {self.min_tokens}", "min_tokens")
        check_tool_choice(self.tool_choice, self.tools)
        for name in self.output_constraints if self.forced_tools else ():
            raise BodyError(
                f"{name}: constrains the answer, and tool_choice demands calls instead: leave one of them out", name
            )
        if self.echo and not self.continue_final_message:
            raise BodyError("echo: needs continue_final_message true", "echo")

    def _check_reasoning(self) -> None:
        for name in self._no_reasoning:
            if self.reasoning_effort not in (None, "none"):
                raise BodyError(f"{name}: cannot be used with reasoning_effort {self.reasoning_effort!r}", name)

    @property
    def _no_reasoning(self) -> list[str]:
        return [name for name in NO_REASONING if name != "reasoning_effort" and getattr(self, name) is not None]

    @property
    def wanted_effort(self) -> str | None:
        """The requested reasoning effort; None: the chat template's default."""
        return "none" if self._no_reasoning else self.reasoning_effort

    def ignored_parts(self) -> Mapping[str, str]:
        """Return `store`, which has no effect."""
        return {"store": "store"} if self.store else {}

    def output_schemas(self) -> Iterator[tuple[str, object]]:
        """See Body."""
        yield from super().output_schemas()
        for at, tool in enumerate(self.tools or ()):
            if tool.function.strict or tool.function.name in self.forced_tools:
                yield f"tools[{at}].function.parameters", tool.function.parameters

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that the model sees: those that it may or must call."""
        if self.tool_choice == "none":
            return []
        names = chosen_tools(self.tool_choice) if isinstance(self.tool_choice, AllowedChoice) else None
        return [tool for tool in self.tools or () if names is None or tool.function.name in names]

    @property
    def forced_tools(self) -> tuple[str, ...]:
        """The names of the tools of which one must be called; empty: the model decides."""
        choice = self.tool_choice
        if isinstance(choice, ChosenTool):
            return chosen_tools(choice)
        is_required = choice == "required" or (isinstance(choice, AllowedChoice) and choice.allowed_tools.mode == "required")
        return tuple(tool.function.name for tool in self.shown_tools) if is_required else ()

    @property
    def max_output_tokens(self) -> int | None:
        """max_completion_tokens, or max_tokens; None without a limit."""
        stated = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return None if stated == NO_LIMIT else stated
