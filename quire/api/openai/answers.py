"""Responses of the OpenAI API, with the fields in its order. A field that has its default value is omitted."""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "tool_calls"]


class CachedTokens(msgspec.Struct, omit_defaults=True):
    """prompt_tokens_details; evicted_tokens: what kv_compression had evicted from the KV cache at the end."""

    cached_tokens: int
    evicted_tokens: int = 0


class ReasoningTokens(msgspec.Struct):
    """completion_tokens_details."""

    reasoning_tokens: int


class Usage(msgspec.Struct, omit_defaults=True):
    """The token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: ReasoningTokens | None = None


class TopLogprob(msgspec.Struct):
    """One of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """One generated token; `bytes` is correct even if `token` is only a part of a character."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The tokens of one choice, or of one chunk of it."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """The tokens of one choice, or of one chunk of it, in the older format; text_offset counts characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ToolCall(msgspec.Struct):
    """A tool call of a complete message."""

    id: str
    type: str
    function: dict[str, str]


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """The message of a choice."""

    role: str
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class PromptLogprob(msgspec.Struct):
    """One token at one position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatChoice(msgspec.Struct, omit_defaults=True):
    """One choice."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(msgspec.Struct, omit_defaults=True):
    """A complete response."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    service_tier: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(msgspec.Struct, omit_defaults=True):
    """One choice, or a delta of it in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(msgspec.Struct):
    """A complete response."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str


class Embedding(msgspec.Struct):
    """One vector; a string is base64 of little-endian 32-bit floats."""

    object: str
    index: int
    embedding: list[float] | str


class PromptUsage(msgspec.Struct):
    """The token counts of a request without output."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct):
    """The vectors of all inputs."""

    object: str
    data: list[Embedding]
    model: str
    usage: PromptUsage


class EncodedEmbeddings(msgspec.Struct):
    """Embeddings whose vectors are already encoded."""

    object: str
    data: list[msgspec.Raw]
    model: str
    usage: PromptUsage


class ModelCard(msgspec.Struct):
    """One name of the model; the last three fields are of the Anthropic API, which uses the same path."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    type: str
    display_name: str
    created_at: str
    """RFC 3339."""


class ModelList(msgspec.Struct):
    """All names, on one page; the last three fields are of the Anthropic API."""

    object: str
    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: bool


class TokenizeAnswer(msgspec.Struct, omit_defaults=True):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """The special tokens by their spelling, None for those that the checkpoint has not, and the chat template."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    vocab_size: int
    model_max_length: int
    chat_template: str | None


class DetokenizeAnswer(msgspec.Struct):
    """The text of tokens."""

    prompt: str
