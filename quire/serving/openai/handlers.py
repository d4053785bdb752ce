"""Shared code of the OpenAI API's handlers: from a call to a caller, from events to an Answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from quire.base.errors import RequestError
from quire.serving.answers import Answer, DirectSink, Ready, Stream, Unary
from quire.serving.core.caller import Caller
from quire.serving.core.events import GenerationEvent
from quire.serving.core.plan import GenerationPlan
from quire.serving.core.resumption import Resumption, is_resumable, resumable_frames
from quire.serving.core.served_model import ServedModel
from quire.serving.core.sinks import DirectFrames, Folding
from quire.serving.core.streams import generation_events
from quire.serving.endpoint import Call, client_id_of
from quire.serving.errors import ApiError
from quire.serving.interfaces import Gateway, Job
from quire.serving.openai.frames import AnswerHead
from quire.serving.openai.requests import make_id
from quire.serving.resume_wire import RESUMABLE_HEADER, RESUME_HEADER

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
        client_id=client_id_of(call.headers),
        received_s=call.received_s,
    )


def resumption_of(call: Call) -> Resumption | None:
    """Return what a call asks for, after its body was read; None for nothing. Raises ApiError."""
    return Resumption.of(call.headers, call.output)


def resumed(plan: GenerationPlan, resumption: Resumption | None, is_streaming: bool, served: ServedModel) -> GenerationPlan:
    """Return the plan of a call with the output so far. Raises RequestError where it cannot be continued."""
    if resumption is None:
        return plan
    if resumption.token_ids and not is_streaming:
        raise RequestError(f"{RESUME_HEADER}: only a stream can be continued", RESUME_HEADER)
    return resumption.apply(plan, served.info.vocab_size, served.info.max_model_len)


def new_head(
    served: ServedModel, prefix: str, service_tier: str | None = None, resumption: Resumption | None = None
) -> AnswerHead:
    """Return the head of a new answer, or of one that another server has begun."""
    return AnswerHead(
        id=make_id(prefix) if resumption is None else prefix + resumption.id_suffix,
        created=int(time.time()) if resumption is None else resumption.created,
        model=served.name,
        fingerprint=served.fingerprint,
        service_tier=service_tier,
    )


async def _frames(gateway: Gateway, jobs: Jobs, encoder: StreamEncoder, direct_sink: DirectSink) -> AsyncIterator[bytes]:
    """Yield the server-sent events of jobs; closing the generator aborts them. Raises ApiError."""
    frames = DirectFrames(direct_sink, encoder.encode, encoder.encode_text)
    async with aclosing(generation_events(gateway, jobs, frames)) as events_of_deltas:
        async for events in events_of_deltas:
            chunks = encoder.encode(events)
            if chunks:
                yield chunks


def stream_answer(
    gateway: Gateway,
    jobs: Jobs,
    encoder: StreamEncoder,
    encode_error: Callable[[ApiError], bytes] = ApiError.openai_event,
    resumption: Resumption | None = None,
) -> Answer:
    """Return an answer that is streamed; with a resumption one that another server can continue, where that is possible."""
    if resumption is not None and len(jobs) == 1 and is_resumable(jobs[0][1]):
        ((job, plan),) = jobs
        frames = resumable_frames(gateway, job, plan, encoder, resumption)
        return Stream(frames, encode_error, headers={RESUMABLE_HEADER: "1"})
    direct_sink = DirectSink()
    return Stream(_frames(gateway, jobs, encoder, direct_sink), encode_error, direct_sink=direct_sink)


def lines_answer(gateway: Gateway, jobs: Jobs, encoder: StreamEncoder, encode_error: Callable[[ApiError], bytes]) -> Answer:
    """Return an answer that is streamed as lines of JSON."""
    direct_sink = DirectSink()
    return Stream(_frames(gateway, jobs, encoder, direct_sink), encode_error, direct_sink=direct_sink, is_lines=True)


def whole_answer(gateway: Gateway, jobs: Jobs, fold: Fold) -> Answer:
    """Return an answer that is sent when it is complete."""

    async def work() -> Ready:
        async with aclosing(generation_events(gateway, jobs, Folding(fold.add))) as events_of_deltas:
            async for events in events_of_deltas:
                fold.add(events)
        return Ready(await asyncio.to_thread(fold.body) if fold.is_long else fold.body())

    return Unary(work)
