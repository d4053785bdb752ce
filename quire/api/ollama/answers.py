"""Answers of the Ollama API. Durations are in nanoseconds."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

DoneReason = Literal["stop", "length", "load", "unload"]


class AnsweredFunction(msgspec.Struct):
    """What the model calls."""

    name: str
    arguments: dict[str, Any]


class AnsweredTool(msgspec.Struct):
    """One call."""

    function: AnsweredFunction


class AnswerMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the assistant says; of a stream a piece of it."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[AnsweredTool] | None = None


class Counts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the last line of an answer has in addition: done_reason and how long what took."""

    done_reason: DoneReason | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class ChatAnswer(Counts, kw_only=True):
    """The answer of /api/chat, or a line of it."""

    model: str
    created_at: str
    message: AnswerMessage
    done: bool


class GenerateAnswer(Counts, kw_only=True):
    """The answer of /api/generate, or a line of it."""

    model: str
    created_at: str
    response: str
    done: bool
    thinking: str | None = None


class EmbedAnswer(msgspec.Struct, kw_only=True):
    """Vectors, in the order of the inputs."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsAnswer(msgspec.Struct):
    """One vector."""

    embedding: list[float]


class ModelDetails(msgspec.Struct, kw_only=True):
    """What kind of model it is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class LocalModel(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A model; the last three are those of a loaded one."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str | None = None
    size_vram: int | None = None
    context_length: int | None = None


class ModelTags(msgspec.Struct):
    """All models."""

    models: list[LocalModel]


class ShownModel(msgspec.Struct, kw_only=True):
    """The description of a model."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct):
    """The version of Ollama whose API this is."""

    version: str
