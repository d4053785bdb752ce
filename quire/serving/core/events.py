"""The neutral events of a generation, from which the answers of every API are encoded.

They are made per token, so they are plain Structs, cheaper than frozen dataclasses. They must not be changed after they are
made.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.serving.engine_client.messages import TokenLogprob

EndReason = Literal["stop", "length", "tool_calls"]
Position = list[TokenLogprob]
"""The log probabilities at one position: first the token itself, then the most likely tokens, which may include it."""


class GenerationStart(msgspec.Struct):
    """The first event of plans with wants_start: the request has started.

    num_cached  prompt tokens taken from the prefix cache
    """

    num_prompt: int
    num_cached: int


class TextDelta(msgspec.Struct):
    """More of the visible answer of a choice; `positions` cover only this text, if they were requested."""

    choice: int
    text: str
    positions: list[Position] | None = None


class ReasoningDelta(msgspec.Struct):
    """More of the reasoning of a choice."""

    choice: int
    text: str


class ToolCallStart(msgspec.Struct):
    """A tool call begins. index counts the calls of the choice from 0."""

    choice: int
    index: int
    call_id: str
    name: str


class ToolCallArguments(msgspec.Struct):
    """More of the JSON text of a call's arguments."""

    choice: int
    index: int
    text: str


class ToolCallEnd(msgspec.Struct):
    """A tool call is over."""

    choice: int
    index: int


class TokensDelta(msgspec.Struct):
    """The new tokens of a choice, before the events that they cause; only in plans with wants_tokens."""

    choice: int
    token_ids: list[int]


class PromptPositions(msgspec.Struct):
    """The log probabilities of the tokens of prompt number `prompt`, if requested; None for the first token."""

    prompt: int
    token_ids: tuple[int, ...]
    positions: list[Position | None]


class PromptEcho(msgspec.Struct):
    """The prompt, as the beginning of a choice; positions as in PromptPositions, None if not requested."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    positions: list[Position | None] | None


class ChoiceEnd(msgspec.Struct):
    """A choice has ended; it has no further events.

    stop_reason  the stop string or stop token that ended it
    """

    choice: int
    finish_reason: EndReason
    stop_reason: int | str | None = None


class UsageEnd(msgspec.Struct):
    """The last event: the token counts of all choices, with those of the prompts counted once.

    num_cached     prompt tokens taken from the prefix cache
    num_reasoning  output tokens that were reasoning
    num_evicted    tokens that kv_compression had evicted at the end
    """

    num_prompt: int
    num_completion: int
    num_cached: int
    num_reasoning: int
    num_evicted: int = 0


GenerationEvent = (
    GenerationStart
    | TextDelta
    | ReasoningDelta
    | ToolCallStart
    | ToolCallArguments
    | ToolCallEnd
    | TokensDelta
    | PromptPositions
    | PromptEcho
    | ChoiceEnd
    | UsageEnd
)
