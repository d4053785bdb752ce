"""Shared code of the OpenAI API's handlers: from a call to a caller, from events to an Answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from quire.serving.answers import Answer, DirectSink, Ready, Stream, Unary
from quire.serving.core.caller import Caller
from quire.serving.core.events import GenerationEvent
from quire.serving.core.plan import GenerationPlan
from quire.serving.core.served_model import ServedModel
from quire.serving.core.sinks import DirectFrames, Folding
from quire.serving.core.streams import generation_events
from quire.serving.endpoint import Call
from quire.serving.errors import ApiError
from quire.serving.interfaces import Gateway, Job
from quire.serving.openai.frames import AnswerHead
from quire.serving.openai.requests import make_id

Jobs = Sequence[tuple[Job, GenerationPlan]]


class StreamEncoder(Protocol):
    """Turns events into server-sent events."""

    def encode(self, events: Sequence[GenerationEvent]) -> bytes: ...

    def encode_text(self, choice: int, text: str) -> bytes:
        """Return the frame for a TextDelta without positions."""
        ...


class Fold(Protocol):
    """Accumulates events into a whole answer. If is_long, `body` takes long and may be called in any thread."""

    @property
    def is_long(self) -> bool: ...

    def add(self, events: Sequence[GenerationEvent]) -> None: ...

    def body(self) -> bytes: ...


def caller_of(call: Call, is_streaming: bool) -> Caller:
    """Return the caller of a call."""
    return Caller(
        owner=call.owner,
        route=call.route,
        deadline_s=call.deadline_s(is_streaming),
        traceparent=call.traceparent,
        call_id=call.request_id,
        received_s=call.received_s,
    )


def new_head(served: ServedModel, prefix: str, service_tier: str | None = None) -> AnswerHead:
    """Return the head of a new answer."""
    return AnswerHead(
        id=make_id(prefix),
        created=int(time.time()),
        model=served.name,
        fingerprint=served.fingerprint,
        service_tier=service_tier,
    )


async def _frames(gateway: Gateway, jobs: Jobs, encoder: StreamEncoder, bypass: DirectSink) -> AsyncIterator[bytes]:
    """Yield the server-sent events of jobs; closing the generator aborts them. Raises ApiError."""
    outlet = DirectFrames(bypass, encoder.encode, encoder.encode_text)
    async with aclosing(generation_events(gateway, jobs, outlet)) as events_of_deltas:
        async for events in events_of_deltas:
            chunks = encoder.encode(events)
            if chunks:
                yield chunks


def stream_answer(
    gateway: Gateway,
    jobs: Jobs,
    encoder: StreamEncoder,
    encode_error: Callable[[ApiError], bytes] = ApiError.openai_event,
) -> Answer:
    """Return an answer that is streamed."""
    bypass = DirectSink()
    return Stream(_frames(gateway, jobs, encoder, bypass), encode_error, bypass=bypass)


def lines_answer(gateway: Gateway, jobs: Jobs, encoder: StreamEncoder, encode_error: Callable[[ApiError], bytes]) -> Answer:
    """Return an answer that is streamed as lines of JSON."""
    bypass = DirectSink()
    return Stream(_frames(gateway, jobs, encoder, bypass), encode_error, bypass=bypass, is_lines=True)


def whole_answer(gateway: Gateway, jobs: Jobs, fold: Fold) -> Answer:
    """Return an answer that is sent when it is complete."""

    async def work() -> Ready:
        async with aclosing(generation_events(gateway, jobs, Folding(fold.add))) as events_of_deltas:
            async for events in events_of_deltas:
                fold.add(events)
        return Ready(await asyncio.to_thread(fold.body) if fold.is_long else fold.body())

    return Unary(work)
