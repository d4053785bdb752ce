"""Request bodies of the Ollama API: /api/chat, /api/generate, /api/embed, /api/embeddings and /api/show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.api.decode import Body, BodyError, Part, check_depth
from quire.api.openai.chat import MAX_MESSAGES, MAX_TOOLS
from quire.api.openai.embeddings import MAX_INPUTS
from quire.api.openai.shared import MAX_DEPTH, MAX_STOP_LENGTH, MAX_STOP_STRINGS, MAX_TOKEN_ID, Name, Penalty, StopString
from quire.api.refusal import Refusal, always, unless

Think = bool | Literal["low", "medium", "high"]
Format = dict[str, Any] | Literal["", "json"]
KeepAlive = Annotated[str | float, Meta(description="Accepted and not used: the model stays loaded.")]


class Options(Part, kw_only=True):
    """Sampling options. Those that say how Ollama loads a model, such as num_ctx, are ignored: the server's options decide."""

    num_predict: Annotated[int, Meta(ge=-2, le=MAX_TOKEN_ID, description="-1, -2: as many as fit.")] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKEN_ID, description="0 and -1: all tokens.")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-1, description="-1: a random one.")] | None = None
    stop: (
        Annotated[str, Meta(max_length=MAX_STOP_LENGTH)] | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None
    ) = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {
            "mirostat": unless(0, reason="is not supported; leave it out, or 0"),
            "tfs_z": unless(1, 1.0, reason="is not supported; leave it out, or 1"),
            "repeat_last_n": unless(-1, reason="is not supported: penalties count the whole context; leave it out, or -1"),
        }


class Function(msgspec.Struct, kw_only=True):
    """A function that the model may call; parameters is a JSON schema."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_depth(self.parameters, MAX_DEPTH, "parameters")


class Tool(msgspec.Struct, kw_only=True):
    """A tool; only functions are supported."""

    function: Function
    type: Literal["function"] | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """What the model called."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: dict[str, Any]

    def __post_init__(self) -> None:
        check_depth(self.arguments, MAX_DEPTH, "arguments")


class CalledTool(msgspec.Struct, kw_only=True):
    """A tool call of an earlier answer."""

    function: CalledFunction


class Message(Part, kw_only=True):
    """A message. tool_name: of role tool, the function whose result this is."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[CalledTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_name: str | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {"images": unless([], reason="only text input is supported")}


class GenerationFields(Body, kw_only=True):
    """Fields that /api/chat and /api/generate have in common. A stream is the default."""

    model: Annotated[Name, Meta(description="One of GET /api/tags.")]
    stream: bool | None = None
    think: Think | None = None
    format: Annotated[Format, Meta(description="'json', or a JSON schema.")] | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {
            "logprobs": unless(False, reason="is not supported here; /v1/chat/completions has it"),
            "top_logprobs": unless(0, reason="is not supported here; /v1/chat/completions has it"),
        }

    @property
    def is_streaming(self) -> bool:
        """Whether the answer comes in pieces, as it does where nothing is said."""
        return self.stream is not False

    def output_schemas(self) -> Iterator[tuple[str, object]]:
        """See Body."""
        if isinstance(self.format, dict):
            yield "format", self.format


class ChatRequest(GenerationFields, kw_only=True):
    """A conversation to be continued; without messages it asks only whether the model is loaded."""

    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None

    def check(self) -> None:
        """Check that no two tools have one name."""
        names = [tool.function.name for tool in self.tools or ()]
        for position, name in enumerate(names):
            if name in names[:position]:
                raise BodyError(f"tools: two have the name {name!r}", f"tools[{position}].function.name")


class GenerateRequest(GenerationFields, kw_only=True):
    """A prompt, put into the chat template unless raw is true; an empty one asks only whether the model is loaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return {
            **super().refusals(),
            "suffix": unless("", reason="is not supported; write the prompt as the model takes it, with raw"),
            "template": unless("", reason="a request cannot bring its own template; use raw"),
            "context": unless([], reason="is no longer supported; use /api/chat"),
            "images": unless([], reason="only text input is supported"),
            **{name: always("is not supported") for name in ("width", "height", "steps")},
        }


class EmbedRequest(Body, kw_only=True):
    """Texts to be embedded."""

    model: Name
    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)]
    truncate: Annotated[bool, Meta(description="Cut what is too long, the default; else it is refused.")] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None


class EmbeddingsRequest(Body, kw_only=True):
    """A text to be embedded, the old way."""

    model: Name
    prompt: str
    options: Options | None = None
    keep_alive: KeepAlive | None = None


class ShowRequest(Body, kw_only=True):
    """The name of a model to be described; name: its old field."""

    model: Name | None = None
    name: Name | None = None
    verbose: bool | None = None
