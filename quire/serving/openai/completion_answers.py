"""Completions from events: the chunks of a stream, and the whole answer, which accumulates the chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.api.openai.answers import Completion, CompletionChoice, CompletionLogprobs, PromptLogprobs
from quire.serving.core.events import (
    ChoiceEnd,
    GenerationEvent,
    PromptEcho,
    PromptPositions,
    TextDelta,
    TokensDelta,
    UsageEnd,
)
from quire.serving.core.plan import GenerationPlan
from quire.serving.errors import ApiError
from quire.serving.openai.frames import AnswerHead, ChunkWriter, StreamOptions, TextSplicer, encode_json, usage_of
from quire.serving.openai.logprobs import MANY_POSITIONS, CompletionTokens, LogprobWriter, encoded, prompt_logprobs
from quire.text.tokenizer import Tokenizer

OBJECT = "text_completion"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionShape:
    """The options of an answer that the request sets.

    num_prompt_logprobs  likely tokens per token of the prompt
    """

    tokenizer: Tokenizer | None
    logprobs: LogprobWriter | None = None
    returns_token_ids: bool = False
    num_prompt_logprobs: int = 0

    def new_tokens(self) -> CompletionTokens | None:
        """Return the writer of the log probabilities of one choice, None if they were not requested."""
        return None if self.logprobs is None else CompletionTokens(self.logprobs, self.tokenizer)


def _write_logprobs(tokens: CompletionTokens | None, event: TextDelta | PromptEcho) -> CompletionLogprobs | None:
    if tokens is None or event.positions is None:
        return None
    if isinstance(event, PromptEcho):
        return tokens.write_prompt(event.text, event.token_ids, event.positions)
    return tokens.write(event.text, event.positions)


class CompletionStreamEncoder:
    """Turns the events of all prompts into server-sent events."""

    def __init__(
        self, head: AnswerHead, shape: CompletionShape, options: StreamOptions, plans: Sequence[GenerationPlan]
    ) -> None:
        self._writer = ChunkWriter(head, OBJECT, options, sum(plan.num_prompt_tokens for plan in plans))
        self._shape = shape
        self._plans = plans
        self._tokens: dict[int, CompletionTokens | None] = {}
        self._pending_ids: dict[int, list[int]] = {}
        self._has_prompt_ids: set[int] = set()
        self._splicers: dict[int, TextSplicer] = {}
        self._is_spliced = self._writer.suffix is not None and not shape.returns_token_ids

    def encode(self, events: Sequence[GenerationEvent]) -> bytes:
        """Return the chunks for some events, b"" for none; with UsageEnd the end of the stream."""
        return b"".join([self._encode(event) for event in events])

    def _encode(self, event: GenerationEvent) -> bytes:
        if isinstance(event, TextDelta):
            if event.positions is None and self._is_spliced:
                return self._splicer(event.choice).chunk(event.text)
            return self._text(event)
        if isinstance(event, PromptEcho):
            return self._text(event)
        if isinstance(event, TokensDelta):
            self._writer.add_tokens(len(event.token_ids))
            if self._shape.returns_token_ids:
                self._pending_ids.setdefault(event.choice, []).extend(event.token_ids)
            return b""
        if isinstance(event, ChoiceEnd):
            choice = CompletionChoice(event.choice, "", None, event.finish_reason, event.stop_reason)
            return self._chunk(choice)
        return self._writer.close(event) if isinstance(event, UsageEnd) else b""

    def encode_text(self, choice: int, text: str) -> bytes:
        """Return the chunk for a TextDelta without positions."""
        return self._splicer(choice).chunk(text) if self._is_spliced else self._text(TextDelta(choice, text))

    def _splicer(self, choice: int) -> TextSplicer:
        found = self._splicers.get(choice)
        if found is None:
            before = b'%s{"index":%d,"text":' % (self._writer.prefix, choice)
            after = b',"logprobs":null,"finish_reason":null}' + (self._writer.suffix or b"")
            found = self._splicers[choice] = TextSplicer(before, after)
        return found

    def _text(self, event: TextDelta | PromptEcho) -> bytes:
        choice = event.choice
        if choice not in self._tokens:
            self._tokens[choice] = self._shape.new_tokens()
        return self._chunk(CompletionChoice(choice, event.text, _write_logprobs(self._tokens[choice], event), None))

    def _chunk(self, choice: CompletionChoice) -> bytes:
        if self._shape.returns_token_ids:
            choice.token_ids = self._pending_ids.pop(choice.index, [])
            if choice.index not in self._has_prompt_ids:
                self._has_prompt_ids.add(choice.index)
                choice.prompt_token_ids = _prompt_ids(self._plans, choice.index)
        return self._writer.chunk(encode_json(choice))


def _prompt_ids(plans: Sequence[GenerationPlan], choice: int) -> Any:
    return plans[choice // plans[0].num_choices].told_prompt_ids()


@dataclass(slots=True)
class _Choice:
    """The accumulated state of a choice."""

    tokens: CompletionTokens | None
    text: list[str] = field(default_factory=list[str])
    pieces: list[TextDelta | PromptEcho] = field(default_factory=list[TextDelta | PromptEcho])
    token_ids: list[int] = field(default_factory=list[int])
    end: ChoiceEnd | None = None


class CompletionFold:
    """Accumulates the events of all prompts into the whole answer."""

    def __init__(self, head: AnswerHead, shape: CompletionShape, plans: Sequence[GenerationPlan]) -> None:
        self._head = head
        self._shape = shape
        self._plans = plans
        self._choices = [_Choice(shape.new_tokens()) for plan in plans for _ in range(plan.num_choices)]
        self._prompt_positions: dict[int, PromptPositions] = {}
        self._num_positions = 0
        self._usage: UsageEnd | None = None

    def add(self, events: Sequence[GenerationEvent]) -> None:
        """Add some events."""
        for event in events:
            if isinstance(event, TextDelta | PromptEcho):
                choice = self._choices[event.choice]
                choice.text.append(event.text)
                if choice.tokens is not None and event.positions is not None:
                    choice.pieces.append(event)
                    self._num_positions += len(event.positions)
            elif isinstance(event, TokensDelta):
                self._choices[event.choice].token_ids += event.token_ids
            elif isinstance(event, ChoiceEnd):
                self._choices[event.choice].end = event
            elif isinstance(event, PromptPositions):
                self._prompt_positions[event.prompt] = event
                self._num_positions += len(event.positions)
            elif isinstance(event, UsageEnd):
                self._usage = event

    @property
    def is_long(self) -> bool:
        """Whether encoding the answer takes long."""
        return self._num_positions > MANY_POSITIONS

    def body(self) -> bytes:
        """Return the answer. Raises ApiError if events are missing. Call once."""
        if self._usage is None:
            raise ApiError(500, "the answer is incomplete", code="internal_error")
        head = self._head
        choices = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        answer = Completion(head.id, OBJECT, head.created, head.model, choices, usage_of(self._usage), head.fingerprint)
        return encode_json(answer)

    def _choice(self, index: int, choice: _Choice) -> CompletionChoice:
        logprobs = None
        if self._shape.logprobs is not None:
            logprobs = CompletionLogprobs([], [], [], [])
            for piece in choice.pieces:
                part = _write_logprobs(choice.tokens, piece)
                if part is None:
                    continue
                logprobs.tokens += part.tokens
                logprobs.token_logprobs += part.token_logprobs
                logprobs.top_logprobs += encoded(part.top_logprobs)
                logprobs.text_offset += part.text_offset
        end, returns_ids = choice.end, self._shape.returns_token_ids
        return CompletionChoice(
            index=index,
            text="".join(choice.text),
            logprobs=logprobs,
            finish_reason=None if end is None else end.finish_reason,
            stop_reason=None if end is None else end.stop_reason,
            token_ids=choice.token_ids if returns_ids else None,
            prompt_token_ids=_prompt_ids(self._plans, index) if returns_ids else None,
            prompt_logprobs=self._prompt_logprobs_of(index // self._plans[0].num_choices),
        )

    def _prompt_logprobs_of(self, prompt: int) -> PromptLogprobs | None:
        event = self._prompt_positions.get(prompt)
        if event is None:
            return None
        return encoded(prompt_logprobs(event.positions, self._shape.tokenizer, self._shape.num_prompt_logprobs))
