"""Chat completions from events: the chunks of a stream, and the whole answer, which accumulates the chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.api.openai.answers import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    PromptLogprobs,
    ToolCall,
)
from quire.serving.core.events import (
    ChoiceEnd,
    GenerationEvent,
    GenerationStart,
    Position,
    PromptEcho,
    PromptPositions,
    ReasoningDelta,
    TextDelta,
    TokensDelta,
    ToolCallArguments,
    ToolCallStart,
    UsageEnd,
)
from quire.serving.core.plan import GenerationPlan
from quire.serving.errors import ApiError
from quire.serving.openai.frames import AnswerHead, ChunkWriter, StreamOptions, TextSplicer, encode_json, usage_of
from quire.serving.openai.logprobs import MANY_POSITIONS, LogprobWriter, encoded, prompt_logprobs

CHUNK = "chat.completion.chunk"
NO_LOGPROBS = b"null"
UNTOLD = (GenerationStart, PromptPositions, PromptEcho)  # events without a chunk in a chat stream


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """The options of an answer that the request sets.

    num_prompt_logprobs  likely tokens per token of the prompt
    """

    logprobs: LogprobWriter | None = None
    returns_token_ids: bool = False
    num_prompt_logprobs: int = 0


class ChatStreamEncoder:
    """Turns the events of one generation into server-sent events."""

    def __init__(self, head: AnswerHead, shape: ChatShape, options: StreamOptions, plan: GenerationPlan) -> None:
        self._writer = ChunkWriter(head, CHUNK, options, plan.num_prompt_tokens)
        self._shape = shape
        self._splicers: dict[int, TextSplicer] = {}
        self._has_started: set[int] = set()
        self._pending_ids: dict[int, list[int]] = {}
        self._extra = b""
        if shape.returns_token_ids:
            self._extra = b'"prompt_token_ids":' + encode_json(plan.told_prompt_ids()) + b","

    def encode(self, events: Sequence[GenerationEvent]) -> bytes:
        """Return the chunks for some events, b"" for none; with UsageEnd the end of the stream."""
        if len(events) == 1:
            event = events[0]
            if type(event) is TextDelta and event.positions is None:
                splicer = self._splicers.get(event.choice)
                if splicer is not None:
                    return splicer.chunk(event.text)
        return b"".join([self._encode(event) for event in events])

    def encode_text(self, choice: int, text: str) -> bytes:
        """Return the chunks for a TextDelta without positions."""
        splicer = self._splicers.get(choice)
        return splicer.chunk(text) if splicer is not None else self._encode(TextDelta(choice, text))

    def _encode(self, event: GenerationEvent) -> bytes:
        if isinstance(event, TokensDelta):
            self._writer.add_tokens(len(event.token_ids))
            if self._shape.returns_token_ids:
                self._pending_ids.setdefault(event.choice, []).extend(event.token_ids)
            return b""
        if isinstance(event, UsageEnd):
            return self._writer.close(event)
        if isinstance(event, UNTOLD):
            return b""
        delta = self._delta(event)
        if delta is None:
            return b""
        start = self._start(event.choice, isinstance(event, TextDelta | ChoiceEnd))
        if isinstance(event, TextDelta):
            return start + self._chunk(event.choice, delta, self._logprobs(event))
        if isinstance(event, ChoiceEnd):
            return start + self._end(event)
        return start + self._chunk(event.choice, delta)

    def _delta(self, event: GenerationEvent) -> bytes | None:
        """Return the delta of an event, None for events that this API does not have."""
        if isinstance(event, TextDelta):
            return b'{"content":' + encode_json(event.text) + b"}"
        if isinstance(event, ReasoningDelta):
            return b'{"reasoning_content":' + encode_json(event.text) + b"}"
        if isinstance(event, ToolCallArguments):
            call = {"index": event.index, "function": {"arguments": event.text}}
            return b'{"tool_calls":[' + encode_json(call) + b"]}"
        if isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": event.call_id, "type": "function", "function": function}
            return b'{"tool_calls":[' + encode_json(call) + b"]}"
        return b"{}" if isinstance(event, ChoiceEnd) else None

    def _start(self, choice: int, has_content: bool) -> bytes:
        """Return the chunk with the role, once for each choice, before its first content."""
        if choice in self._has_started:
            return b""
        self._has_started.add(choice)
        if self._writer.suffix is not None and not self._shape.returns_token_ids:
            before = b'%s{"index":%d,"delta":{"content":' % (self._writer.prefix, choice)
            after = b'},"logprobs":null,"finish_reason":null}' + self._writer.suffix
            self._splicers[choice] = TextSplicer(before, after)
        content = b'""' if has_content else b"null"
        extra, self._extra = self._extra, b""
        return self._writer.chunk(
            b'{"index":%d,"delta":{"role":"assistant","content":%s},"logprobs":null,"finish_reason":null}' % (choice, content),
            extra,
            has_tokens=False,
        )

    def _logprobs(self, event: TextDelta) -> bytes:
        if self._shape.logprobs is None or not event.positions:
            return NO_LOGPROBS
        return encode_json(self._shape.logprobs.chat(event.positions))

    def _end(self, event: ChoiceEnd) -> bytes:
        more = b"" if event.stop_reason is None else b',"stop_reason":' + encode_json(event.stop_reason)
        return self._chunk(event.choice, b"{}", NO_LOGPROBS, encode_json(event.finish_reason) + more)

    def _chunk(self, choice: int, delta: bytes, logprobs: bytes = NO_LOGPROBS, finish: bytes = b"null") -> bytes:
        token_ids = self._pending_ids.pop(choice, None)
        if token_ids is not None:
            finish += b',"token_ids":' + encode_json(token_ids)
        return self._writer.chunk(
            b'{"index":%d,"delta":%s,"logprobs":%s,"finish_reason":%s}' % (choice, delta, logprobs, finish)
        )


@dataclass(slots=True)
class _Choice:
    """The accumulated state of a choice."""

    text: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[ToolCallStart] = field(default_factory=list[ToolCallStart])
    arguments: list[list[str]] = field(default_factory=list[list[str]])
    positions: list[Position] = field(default_factory=list[Position])
    token_ids: list[int] = field(default_factory=list[int])
    end: ChoiceEnd | None = None


class ChatFold:
    """Accumulates the events of one generation into the whole answer."""

    def __init__(self, head: AnswerHead, shape: ChatShape, plan: GenerationPlan) -> None:
        self._head = head
        self._shape = shape
        self._plan = plan
        self._choices = [_Choice() for _ in range(plan.num_choices)]
        self._prompt: PromptPositions | None = None
        self._usage: UsageEnd | None = None

    def add(self, events: Sequence[GenerationEvent]) -> None:
        """Add some events."""
        for event in events:
            if isinstance(event, UsageEnd):
                self._usage = event
            elif isinstance(event, PromptPositions):
                self._prompt = event
            elif not isinstance(event, GenerationStart):
                self._add(self._choices[event.choice], event)

    def _add(self, choice: _Choice, event: GenerationEvent) -> None:
        if isinstance(event, TextDelta):
            choice.text.append(event.text)
            if self._shape.logprobs is not None and event.positions:
                choice.positions += event.positions
        elif isinstance(event, ReasoningDelta):
            choice.reasoning.append(event.text)
        elif isinstance(event, ToolCallStart):
            choice.calls.append(event)
            choice.arguments.append([])
        elif isinstance(event, ToolCallArguments):
            choice.arguments[event.index].append(event.text)
        elif isinstance(event, TokensDelta):
            choice.token_ids += event.token_ids
        elif isinstance(event, ChoiceEnd):
            choice.end = event

    @property
    def is_long(self) -> bool:
        """Whether encoding the answer takes long."""
        num_prompt = 0 if self._prompt is None else len(self._prompt.positions)
        return num_prompt + sum(len(choice.positions) for choice in self._choices) > MANY_POSITIONS

    def body(self) -> bytes:
        """Return the answer. Raises ApiError if events are missing."""
        if self._usage is None:
            raise ApiError(500, "the answer is incomplete", code="internal_error")
        head, returns_ids = self._head, self._shape.returns_token_ids
        answer = ChatCompletion(
            id=head.id,
            object="chat.completion",
            created=head.created,
            model=head.model,
            choices=[self._choice(index, choice) for index, choice in enumerate(self._choices)],
            usage=usage_of(self._usage),
            system_fingerprint=head.fingerprint,
            service_tier=head.service_tier,
            prompt_logprobs=None if self._prompt is None else self._write_prompt(self._prompt),
            prompt_token_ids=self._plan.told_prompt_ids() if returns_ids else None,
        )
        return encode_json(answer)

    def _choice(self, index: int, choice: _Choice) -> ChatChoice:
        calls = [
            ToolCall(call.call_id, "function", {"name": call.name, "arguments": "".join(arguments)})
            for call, arguments in zip(choice.calls, choice.arguments, strict=True)
        ]
        text = "".join(choice.text)
        message = ChatMessage(
            role="assistant",
            content=None if not text and (calls or choice.reasoning) else text,
            refusal=None,
            reasoning_content="".join(choice.reasoning) or None,
            tool_calls=calls or None,
        )
        end = choice.end
        return ChatChoice(
            index=index,
            message=message,
            logprobs=None if self._shape.logprobs is None else self._write_positions(self._shape.logprobs, choice.positions),
            finish_reason=None if end is None else end.finish_reason,
            stop_reason=None if end is None else end.stop_reason,
            token_ids=choice.token_ids if self._shape.returns_token_ids else None,
        )

    def _write_prompt(self, event: PromptPositions) -> PromptLogprobs:
        return encoded(prompt_logprobs(event.positions, self._plan.tokenizer, self._shape.num_prompt_logprobs))

    @staticmethod
    def _write_positions(writer: LogprobWriter, positions: Sequence[Position]) -> ChatLogprobs:
        return ChatLogprobs([entry for position in positions for entry in encoded(writer.chat([position]).content)])
