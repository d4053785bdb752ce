"""GenerationPlan: one request for the engine, and how its deltas are to be read."""

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
    """How the text of a model is told apart into answer, reasoning and tool calls; a new parser is made per choice.

    marker_token_ids  marker of a format -> its special token, where the vocabulary has one
    has_calls_alone   nothing but calls may come behind the reasoning: what is cut is no text
    count_output      told of every choice that was read for tool calls: "parsed" or "none"
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

    num_choices           choices of the answer; with is_copied the engine runs one, and the others are copies of it
    tokenizer             None where the model has none: then there is no text
    parser                None: all text is answer
    has_positions         text comes with what is known of its tokens
    has_prompt_positions  of the prompt's tokens too, as a PromptPositions
    shows_reasoning       False leaves reasoning out of the events; it is counted all the same
    hides_special_tokens  special tokens are no part of the answer, but those that the parser wants
    hides_output          only the prompt was asked about: the one token that is generated is left out
    echo_text             comes first in every choice
    echoes_prompt         echo_text is the prompt: it comes as a PromptEcho
    wants_tokens          TokensDelta events are wanted
    wants_start           a GenerationStart is wanted
    prompt_ids            the tokens of the prompt as JSON, where they are to be told
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

    def told_prompt_ids(self) -> Any:
        """Return the tokens of the prompt, encoded."""
        return msgspec.Raw(write_ids(self.request.prompt_token_ids) if self.prompt_ids is None else self.prompt_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """A conversation as any API states it, in the form of the OpenAI API's messages and tools.

    tools                    [{"type": "function", "function": {"name", "description", "parameters"}}], None for none
    continues_final_message  the last message is the beginning of the answer
    template_variables       more variables of the chat template, such as enable_thinking
    reasoning_effort         as quire.serving.core.reasoning_effort knows it, None: the template's own
    parallel_tool_calls      False cuts the answer after the first call
    forced_tools             names of tools of which at least one is to be called; empty: the model decides
    strict_tools             names of those whose arguments have to be of their schema where they are called
    param                    the field that the messages were sent in, for errors
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
    """What is asked of a generation beside its prompt.

    sampling  the fields of SamplingParams that the request states; max_tokens 0 asks about the prompt alone. In a
              conversation `constraint` is of the answer, and stands behind the reasoning
    salt      of the request, on top of the owner's
    cache_retention_s  see Request
    room_param  the field that states max_tokens, where that many have to fit behind the prompt; None: they are cut to what the
                context has left
    tells_prompt_ids  the answer has the tokens of the prompt
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
    tells_prompt_ids: bool = False
