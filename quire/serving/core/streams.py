"""Merges the streams of one or several plans into one stream of lists of events; each list has the events of one engine
delta."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Protocol

import msgspec

from quire.serving.core.choice_reader import ChoiceReader
from quire.serving.core.events import (
    ChoiceEnd,
    GenerationEvent,
    GenerationStart,
    PromptEcho,
    PromptPositions,
    TextDelta,
    TokensDelta,
    UsageEnd,
)
from quire.serving.core.plan import GenerationPlan
from quire.serving.engine_client.messages import ChoiceDelta, RequestDelta
from quire.serving.errors import engine_unavailable
from quire.serving.interfaces import Gateway, GenerationStream, Job, Sink

MAX_WAITING_LISTS = 64


class EventSink(Protocol):
    """A sink that takes events immediately, in place of a consumer that waits in the iteration."""

    @property
    def is_open(self) -> bool:
        """Whether it accepts events now."""
        ...

    def put(self, events: list[GenerationEvent]) -> None:
        """Take the events of one delta. Its exceptions are raised from the iteration."""
        ...

    def put_text(self, choice: int, text: str) -> None:
        """Take text that is a single TextDelta without positions."""
        ...


class GenerationReader:
    """Turns the deltas of one plan into events, synchronously.

    prompt        the number of the plan in the answer: its choices follow those of the plans before it
    first_choice  the number of its first choice
    """

    def __init__(self, plan: GenerationPlan, prompt: int = 0) -> None:
        self._plan = plan
        self._prompt = prompt
        self.first_choice = prompt * plan.num_choices
        self._choices = [ChoiceReader(plan, self.first_choice + index) for index in range(plan.num_choices)]
        self._is_plain = (
            len(self._choices) == 1
            and self._choices[0].is_plain
            and not (plan.is_copied or plan.hides_output or plan.wants_tokens)
        )
        self._has_started = False
        self._num_completion = 0
        self._num_cached = 0
        self._num_evicted = 0

    @property
    def has_ended(self) -> bool:
        """Whether every choice has ended, possibly before the engine has."""
        return all(choice.has_ended for choice in self._choices)

    @property
    def may_end_early(self) -> bool:
        """Whether the answer may end before the engine's last delta."""
        return self._plan.parser is not None and not self._plan.parser.parallel_tool_calls

    def feed(self, delta: RequestDelta) -> list[GenerationEvent]:
        """Return the events of a delta. Raises ApiError for a request that the engine aborted."""
        events: list[GenerationEvent] = []
        if delta.metrics is not None:
            self._num_cached = delta.metrics.num_cached_tokens
            self._num_evicted = delta.metrics.num_evicted_tokens
            if delta.finished:
                self._num_completion += delta.metrics.num_unreturned_tokens
        if not self._has_started:
            self._start(delta, events)
        for choice in delta.choices:
            if choice.finish_reason in ("abort", "error"):
                if self.has_ended:
                    continue
                raise engine_unavailable("the request was aborted before it was complete")
            if not self._plan.is_copied:
                self._read(choice, choice.index, events)
                continue
            for index in range(self._plan.num_choices):
                self._read(choice, index, events)
        if self.has_ended:
            events.append(self.usage())
        elif delta.finished:
            raise engine_unavailable("the engine ended the request before it was complete")
        return events

    def feed_text(self, delta: RequestDelta) -> str | None:
        """Return the text of a delta that causes only a TextDelta; None, without any effect, if the delta must be passed to
        feed."""
        if not self._is_plain or not self._has_started or delta.metrics is not None or len(delta.choices) != 1:
            return None
        choice = delta.choices[0]
        if choice.finish_reason is not None:
            return None
        self._num_completion += len(choice.token_ids)
        return choice.text

    def usage(self) -> UsageEnd:
        """Return the token counts so far."""
        num_reasoning = sum(choice.num_reasoning for choice in self._choices)
        num_prompt = self._plan.num_prompt_tokens
        return UsageEnd(num_prompt, self._num_completion, self._num_cached, num_reasoning, self._num_evicted)

    def _start(self, delta: RequestDelta, events: list[GenerationEvent]) -> None:
        plan = self._plan
        self._has_started = True
        if plan.wants_start:
            events.append(GenerationStart(plan.num_prompt_tokens, self._num_cached))
        token_ids = plan.request.prompt_token_ids
        if plan.has_prompt_positions and delta.prompt_logprobs is not None:
            events.append(PromptPositions(self._prompt, token_ids, delta.prompt_logprobs))
        if not plan.echo_text:
            return
        for index in range(plan.num_choices):
            choice = self.first_choice + index
            if plan.echoes_prompt:
                positions = delta.prompt_logprobs if plan.has_positions else None
                events.append(PromptEcho(choice, plan.echo_text, token_ids, positions))
            else:
                events.append(TextDelta(choice, plan.echo_text, [] if plan.has_positions else None))

    def _read(self, delta: ChoiceDelta, index: int, events: list[GenerationEvent]) -> None:
        reader = self._choices[index]
        if reader.has_ended:
            return
        if self._plan.hides_output:
            if delta.finish_reason is not None:
                reader.has_ended = True
                events.append(ChoiceEnd(self.first_choice + index, "length"))
            return
        self._num_completion += len(delta.token_ids)
        if self._plan.wants_tokens:
            events.append(TokensDelta(self.first_choice + index, delta.token_ids))
        reader.feed(delta, events)


async def generation_events(
    gateway: Gateway, jobs: Sequence[tuple[Job, GenerationPlan]], sink: EventSink | None = None
) -> AsyncGenerator[list[GenerationEvent], None]:
    """Open the jobs and yield their events; the choices of plan i are numbered from i * num_choices. Ends with one UsageEnd for
    all.

    Events that a sink takes are not yielded, except the end of a choice. Raises ApiError. Closing the generator aborts
    running jobs.
    """
    if len(jobs) == 1:
        ((job, plan),) = jobs
        async with gateway.open(job) as stream:
            reader = GenerationReader(plan)
            if sink is not None and not reader.may_end_early:
                stream.attach_sink(_delta_callback(reader, sink))
            async for events in _read_stream(stream, reader):
                yield events
        return
    async with AsyncExitStack() as stack:
        opened: list[tuple[GenerationStream, GenerationReader]] = []
        for prompt, (job, plan) in enumerate(jobs):
            stream = await stack.enter_async_context(gateway.open(job))
            opened.append((stream, GenerationReader(plan, prompt)))
        async for events in _merge(opened):
            yield events


def _delta_callback(reader: GenerationReader, sink: EventSink) -> Sink:
    """Return a callback for deltas in which no choice ends, while the sink is open."""
    first_choice = reader.first_choice

    def take(delta: RequestDelta) -> bool:
        if not sink.is_open:
            return False
        text = reader.feed_text(delta)
        if text is not None:
            if text:
                sink.put_text(first_choice, text)
            return True
        for choice in delta.choices:
            if choice.finish_reason is not None:
                return False
        events = reader.feed(delta)
        if events:
            sink.put(events)
        return True

    return take


async def resumable_events(
    gateway: Gateway, job: Job, plan: GenerationPlan, resumed: RequestDelta | None
) -> AsyncGenerator[tuple[list[GenerationEvent], list[int]], None]:
    """Yield the events of each delta of a plan with one choice, and its tokens; there may be tokens without events.

    resumed  the output that the request goes on from, as a delta; its events come first, with its tokens
    """
    async with gateway.open(job) as stream:
        reader = GenerationReader(replace(plan, wants_tokens=True))
        if resumed is not None:
            yield _without_tokens(reader.feed(resumed))
        async for events in _read_stream(stream, reader):
            yield _without_tokens(events)


def _without_tokens(events: list[GenerationEvent]) -> tuple[list[GenerationEvent], list[int]]:
    token_ids = [token_id for event in events if isinstance(event, TokensDelta) for token_id in event.token_ids]
    return [event for event in events if not isinstance(event, TokensDelta)], token_ids


async def _read_stream(stream: GenerationStream, reader: GenerationReader) -> AsyncGenerator[list[GenerationEvent], None]:
    async for delta in stream:
        events = reader.feed(delta)
        if reader.has_ended:
            if not delta.finished:
                stream.abort("tool_cut")
            yield events
            return
        if events:
            yield events
    raise engine_unavailable("the engine ended the request before it was complete")


async def _merge(
    opened: Sequence[tuple[GenerationStream, GenerationReader]],
) -> AsyncGenerator[list[GenerationEvent], None]:
    """Yield the events of several streams as they arrive, and the sum of their usages at the end."""
    queue: asyncio.Queue[list[GenerationEvent] | Exception] = asyncio.Queue(MAX_WAITING_LISTS)

    async def pump(stream: GenerationStream, reader: GenerationReader) -> None:
        try:
            async for events in _read_stream(stream, reader):
                await queue.put(events)
        except Exception as error:  # noqa: BLE001 - raised by the reader of the queue
            await queue.put(error)

    tasks = [asyncio.create_task(pump(stream, reader)) for stream, reader in opened]
    usages: list[UsageEnd] = []
    try:
        while len(usages) < len(opened):
            events = await queue.get()
            if isinstance(events, Exception):
                raise events
            last = events[-1]
            if isinstance(last, UsageEnd):
                usages.append(last)
                events = events[:-1]
            if events:
                yield events
        yield [_sum(usages)]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _sum(usages: Iterable[UsageEnd]) -> UsageEnd:
    counts = [msgspec.structs.astuple(usage) for usage in usages]
    return UsageEnd(*map(sum, zip(*counts, strict=True)))
