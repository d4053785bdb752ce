"""POST /v1/responses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from quire.api.openai.responses import ResponsePrompt, ResponsesRequest
from quire.api.openai.responses_answers import Event, Response, TextDone
from quire.serving.answers import Answer, DirectSink, Ready, Stream, Unary
from quire.serving.context import ServerContext
from quire.serving.core.caller import Caller
from quire.serving.core.plan import GenerationPlan
from quire.serving.core.prepare import prepare_chat
from quire.serving.core.sinks import DirectFrames, Folding
from quire.serving.core.sse import named_frame
from quire.serving.core.streams import generation_events
from quire.serving.endpoint import Call
from quire.serving.errors import ApiError, invalid
from quire.serving.interfaces import Gateway
from quire.serving.openai.frames import encode_json
from quire.serving.openai.handlers import Jobs, caller_of
from quire.serving.openai.logprobs import LogprobWriter
from quire.serving.openai.requests import make_id, priority_of, tier_of
from quire.serving.responses.background import BackgroundResponses, refuse_unfinished
from quire.serving.responses.machine import ResponseMachine
from quire.serving.responses.requests import (
    Earlier,
    chat_input,
    ignored_by_model,
    items_of,
    new_response,
    response_options,
    stored_items,
)
from quire.serving.responses.store import ResponseStore, StoredResponse


@dataclass(slots=True)
class ResponseRoutes:
    """The objects that the routes of the Responses API use.

    opened           None until the engine is loaded for the first time
    keeps_responses  False: responses are never stored, and have "store": false
    """

    server: ServerContext
    opened: ResponseStore | None = None
    keeps_responses: bool = True
    background: BackgroundResponses = field(default_factory=BackgroundResponses)

    @property
    def store(self) -> ResponseStore:
        """The store. Raises ApiError 503 while there is none."""
        if self.opened is None:
            raise ApiError(503, "the response store is not open yet", code="engine_unavailable", retry_after_s=1)
        return self.opened


@dataclass(frozen=True, slots=True)
class _ResponseSaver:
    """Stores one response when it has ended, and appends it to its conversation.

    store            None: neither
    is_kept          False: the response itself is not stored
    conversation_id  None: it belongs to none
    """

    store: ResponseStore | None
    owner: str
    items: bytes
    is_kept: bool
    conversation_id: str | None

    async def keep(self, response: Response, body: bytes) -> None:
        """Store the response; `body` is the encoded response. Raises ApiError 503."""
        if self.store is None:
            return
        if not self.is_kept:
            await self.store.append(self.owner, self.conversation_id or "", self.items, body)
            return
        record = StoredResponse(id=response.id, previous_id=response.previous_response_id, items=self.items, body=body)
        await self.store.put(self.owner, record, self.conversation_id)


async def post_response(routes: ResponseRoutes, call: Call) -> Answer:
    """Continue a conversation, perhaps a stored one."""
    context = routes.server
    context.check_accepting()
    body = await call.body(ResponsesRequest, max_bytes=context.max_chat_bytes)
    call.ignore(ignored_by_model(context.model, body))
    return await respond(routes, body, caller_of(call, bool(body.stream)))


async def respond(routes: ResponseRoutes, body: ResponsesRequest, caller: Caller) -> Answer:
    """Return the answer to a request for a response. Raises ApiError and RequestError."""
    context = routes.server
    served = context.check_model(body.model)
    owner = caller.owner.name
    history = await stored_history(routes, body, owner)
    response_id = make_id("resp_" + context.config.replica_id)

    is_kept = body.is_stored and routes.keeps_responses
    has_store = is_kept or body.conversation_id is not None
    if body.background:
        if caller.call_id is None:
            raise invalid("background: a batch is in the background already; leave it out", "background")
        # Nobody waits on a connection: what its client says about that does not count.
        caller = replace(caller, deadline_s=time.monotonic() + context.config.default_timeout_s)

    def prepare() -> tuple[GenerationPlan, bytes]:
        chat = chat_input(served, body, history)
        plan = prepare_chat(served, response_id, chat, response_options(body), caller.owner)
        return plan, encode_json(stored_items(items_of(body))) if has_store else b"[]"

    texts = (body, [(stored.items, stored.body) for stored in history])
    plan, items = await context.prepare(caller.owner, caller.call_id, texts, prepare)
    store = routes.store if has_store else None
    response = new_response(response_id, int(time.time()), served.name, body, plan.request.params)
    priority = priority_of(body.service_tier, caller.owner)
    response.store, response.service_tier = is_kept, tier_of(priority)
    logprobs = LogprobWriter(served.tokenizer, body.top_logprobs or 0, as_ids=False) if body.has_logprobs else None
    custom_tools = frozenset(tool.name or "" for tool in body.shown_tools if tool.is_custom)
    machine = ResponseMachine(response, logprobs, custom_tools=custom_tools)
    keeper = _ResponseSaver(store, owner, items, is_kept, body.conversation_id)
    response.background = bool(body.background)
    jobs: Jobs = [(caller.job(plan.request, bool(body.stream), priority), plan)]
    if body.background:
        return Ready(await _begin_in_background(routes, jobs, machine, response, keeper))
    if body.stream:
        direct_sink = DirectSink()
        frames = _frames(context.gateway, jobs, machine, keeper, direct_sink)
        return Stream(frames, lambda error: named_frame(machine.fail(error)), direct_sink=direct_sink)

    async def work() -> Ready:
        async with aclosing(generation_events(context.gateway, jobs, Folding(machine.feed))) as events_of_deltas:
            async for events in events_of_deltas:
                machine.feed(events)
        whole = machine.response()
        encoded = await _encode(machine, lambda: encode_json(whole))
        await keeper.keep(whole, encoded)
        return Ready(encoded)

    return Unary(work)


async def _begin_in_background(
    routes: ResponseRoutes, jobs: Jobs, machine: ResponseMachine, response: Response, keeper: _ResponseSaver
) -> bytes:
    """Store a response as queued and begin to make it; return it. Raises ApiError."""
    await keeper.keep(response, encode_json(msgspec.structs.replace(response, status="queued")))

    async def keep(body: bytes) -> None:
        await routes.store.replace(keeper.owner, response.id, body, keeper.conversation_id)

    return routes.background.start(routes.server.gateway, jobs, machine, response, keeper.owner, keep)


async def stored_history(routes: ResponseRoutes, body: ResponsePrompt, owner: str) -> Sequence[Earlier]:
    """Return the responses that a request continues, oldest first, or the items of its conversation. Raises ApiError."""
    conversation_id = body.conversation_id
    if conversation_id is not None:
        if not routes.keeps_responses:
            raise invalid("conversation: no conversations are stored here; send their items as input", "conversation")
        return [await routes.store.conversation(lambda table, now, _: table.history(owner, conversation_id, now))]
    if body.previous_response_id is None:
        return []
    if not routes.keeps_responses:
        raise invalid("previous_response_id: no responses are stored here; send their items as input", "previous_response_id")
    if routes.background.current(owner, body.previous_response_id) is not None:
        raise refuse_unfinished(body.previous_response_id)
    return await routes.store.history(owner, body.previous_response_id)


async def _encode(machine: ResponseMachine, encode: Callable[[], bytes]) -> bytes:
    """Return the result of an encoding function, in a thread if that takes long."""
    return await asyncio.to_thread(encode) if machine.is_long else encode()


class _EventFrames(DirectFrames):
    """Writes events directly to the connection while none of them can be long."""

    def __init__(self, direct_sink: DirectSink, machine: ResponseMachine) -> None:
        super().__init__(direct_sink, lambda events: _frame_of(machine.feed(events)))
        self._machine = machine

    @property
    def is_open(self) -> bool:
        """Whether the connection accepts frames now."""
        return super().is_open and not self._machine.is_long


def _frame_of(events: Sequence[Event]) -> bytes:
    return b"".join([named_frame(event) for event in events])


async def _frames(
    gateway: Gateway, jobs: Jobs, machine: ResponseMachine, keeper: _ResponseSaver, direct_sink: DirectSink
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a response. It is stored before the last event, because clients may continue it at once.

    An error after the first event ends the response as failed, which is stored too; an earlier error is raised.
    """

    try:
        async with aclosing(generation_events(gateway, jobs, _EventFrames(direct_sink, machine))) as events_of_deltas:
            async for events in events_of_deltas:
                found = machine.feed(events)
                has_whole = any(isinstance(event, TextDone) for event in found)
                frame = await _encode(machine, partial(_frame_of, found)) if has_whole else _frame_of(found)
                if frame:
                    yield frame
    except ApiError as error:
        if not machine.has_started:
            raise
        failed = machine.failed_response(error)
        await keeper.keep(failed, await _encode(machine, lambda: encode_json(failed)))
        last = machine.fail(error)
        yield await _encode(machine, lambda: named_frame(last))
        return
    whole = machine.response()
    await keeper.keep(whole, await _encode(machine, lambda: encode_json(whole)))
    last = machine.finish(whole)
    yield await _encode(machine, lambda: named_frame(last))
