"""GenerationPlan: one request for the engine, and how to read its deltas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.contracts.request import Request
from quire.serving.core.long_prompts import write_ids
from quire.text.parsing.tools import Tool
from quire.text.tokenizer import Tokenizer


def ignore_outcome(_outcome: str) -> None:
    """Count nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserSetup:
    """How to parse a model's text into answer, reasoning and tool calls. Each choice gets a new parser.

    marker_token_ids  marker of a format -> its special token, where the vocabulary has one
    has_calls_alone   only calls may follow the reasoning, so a truncated call is not text
    count_output      called for every choice that was parsed for tool calls, with "parsed" or "none"
    """

    tool_format: str | None
    reasoning_format: str | None
    tools: tuple[Tool, ...]
    starts_in_reasoning: bool
    starts_in_call: bool
    parallel_tool_calls: bool
    marker_token_ids: Mapping[str, int]
    has_calls_alone: bool = False
    count_output: Callable[[str], None] = ignore_outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """One request and how to read it.

    num_choices           choices of the answer; with is_copied the engine runs only one, and the others are copies
    tokenizer             None if the model has none: then there is no text
    parser                None: all text is answer
    has_positions         text has the log probabilities of its tokens
    has_prompt_positions  also for the prompt's tokens, as a PromptPositions
    shows_reasoning       False leaves reasoning out of the events; its tokens are still counted
    hides_special_tokens  special tokens are not part of the answer, except those that the parser needs
    hides_output          only the prompt was requested: the one generated token is left out
    echo_text             text at the start of every choice
    echoes_prompt         echo_text is the prompt and becomes a PromptEcho
    wants_tokens          TokensDelta events are wanted
    wants_start           a GenerationStart is wanted
    prompt_ids            the prompt's token ids as JSON, if they are part of the answer
    is_complete           nothing follows the output that the request goes on from
    """

    request: Request
    tokenizer: Tokenizer | None
    num_choices: int = 1
    is_copied: bool = False
    parser: ParserSetup | None = None
    has_positions: bool = False
    has_prompt_positions: bool = False
    shows_reasoning: bool = True
    hides_special_tokens: bool = True
    hides_output: bool = False
    echo_text: str = ""
    echoes_prompt: bool = False
    wants_tokens: bool = False
    wants_start: bool = False
    prompt_ids: bytes | None = None
    is_complete: bool = False

    def told_prompt_ids(self) -> Any:
        """Return the prompt's token ids as JSON."""
        return msgspec.Raw(write_ids(self.request.prompt_token_ids) if self.prompt_ids is None else self.prompt_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """A conversation of any API, with messages and tools in the format of the OpenAI API.

    tools                    [{"type": "function", "function": {"name", "description", "parameters"}}], None for none
    continues_final_message  the last message is the beginning of the answer
    template_variables       more variables of the chat template, such as enable_thinking
    reasoning_effort         a level of quire.serving.core.reasoning_effort; None: the template's default
    parallel_tool_calls      False cuts the answer after the first call
    forced_tools             names of tools of which at least one must be called; empty: the model decides
    strict_tools             names of the tools whose arguments must match their schema
    param                    the field that contains the messages, for errors
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continues_final_message: bool = False
    template_variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    reasoning_effort: str | None = None
    parallel_tool_calls: bool = True
    forced_tools: tuple[str, ...] = ()
    strict_tools: frozenset[str] = frozenset()
    param: str = "messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """The options of a generation, other than its prompt.

    sampling  the fields of SamplingParams that the request states; max_tokens 0 asks about the prompt alone. In a
              conversation `constraint` is of the answer, after the reasoning
    salt      of the request, on top of the owner's
    cache_retention_s  see Request
    room_param  the field that states max_tokens, where that many have to fit after the prompt; None: they are cut to what the
                context has left
    returns_prompt_ids  the answer has the tokens of the prompt
    """

    sampling: Mapping[str, Any]
    room_param: str | None = None
    salt: str = ""
    cache_retention_s: float = 0.0
    echo: bool = False
    shows_reasoning: bool = True
    wants_tokens: bool = False
    wants_start: bool = False
    is_streaming: bool = False
    returns_prompt_ids: bool = False
