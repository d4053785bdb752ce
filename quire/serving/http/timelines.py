"""Routes of timelines: what happened to a request. A key sees its own requests, an admin's key all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from quire.contracts.timeline import RequestTimeline
from quire.serving.answers import Answer, Ready
from quire.serving.endpoint import Call, Endpoint
from quire.serving.engine_client.client import EngineClient
from quire.serving.errors import not_found
from quire.serving.interfaces import Tenant
from quire.serving.metrics.request_record import RequestRecord
from quire.serving.metrics.timeline_answers import KeptTimelines, RequestTimelines, steps_of, timeline_of
from quire.serving.metrics.timelines import KeptTimeline, TimelineStore, is_request_named

_SHOWN_ID = 200


@dataclass(frozen=True, slots=True)
class TimelineParts:
    """The objects that these routes use.

    store     None if no timelines are kept
    records   of the unfinished requests
    replicas  the clients of the engines
    """

    store: TimelineStore | None
    records: dict[str, RequestRecord]
    replicas: Sequence[EngineClient]
    clock: Callable[[], float] = time.monotonic


async def get_timeline(parts: TimelineParts, call: Call) -> Answer:
    """The timelines of the requests with an id."""
    wanted = call.path_params["request_id"]
    store = parts.store
    if store is None:
        raise not_found("timelines are not kept: the server runs with --max-timelines 0", param="request_id")
    found = [kept for kept in store.ended(_owner_of(call.owner)) if kept.has_id(wanted)]
    found += await _unfinished(parts, [record for record in _own_records(parts, call.owner) if _has_id(record, wanted)])
    if not found:
        num_kept = len(store.ended(_owner_of(call.owner)))
        raise not_found(
            f"no request with the id {wanted[:_SHOWN_ID]!r} is running or kept: the timelines of the last {store.max_kept} "
            f"ended requests are kept (--max-timelines), {num_kept} now",
            param="request_id",
        )
    offset_s = time.time() - parts.clock()

    def encode() -> bytes:
        return msgspec.json.encode(RequestTimelines([timeline_of(kept, offset_s) for kept in found]))

    return Ready(await asyncio.to_thread(encode))


async def list_timelines(parts: TimelineParts, call: Call) -> Answer:
    """The timelines of all kept and running requests, and the engines' last steps."""
    store = parts.store
    if store is None:
        raise not_found("timelines are not kept: the server runs with --max-timelines 0")
    found = store.ended(_owner_of(call.owner)) + await _unfinished(parts, _own_records(parts, call.owner))
    offset_s, steps = time.time() - parts.clock(), list(store.steps)

    def encode() -> bytes:  # a second's work where all requests have many events
        timelines = [timeline_of(kept, offset_s) for kept in found]
        return msgspec.json.encode(KeptTimelines(store.max_kept, timelines, steps_of(steps, offset_s)))

    return Ready(await asyncio.to_thread(encode))


def _owner_of(caller: Tenant) -> str | None:
    return None if caller.is_admin else caller.name


def _own_records(parts: TimelineParts, caller: Tenant) -> list[RequestRecord]:
    owner = _owner_of(caller)
    return [record for record in parts.records.values() if owner is None or record.job.owner.name == owner]


def _has_id(record: RequestRecord, wanted: str) -> bool:
    return is_request_named(wanted, str(record.job.request.request_id), record.job.call_id, record.job.client_id)


async def _unfinished(parts: TimelineParts, records: Sequence[RequestRecord]) -> list[KeptTimeline]:
    """Return the timelines so far of unfinished requests; those that end meanwhile are as they are then."""
    wanted = [str(record.job.request.request_id) for record in records if record.dispatched_s is not None]
    found: dict[str, RequestTimeline] = {}
    for replica in parts.replicas:
        found |= await replica.timelines_of(wanted)
    now_s = parts.clock()
    return [KeptTimeline.of(record, now_s, found.get(record.job.request.request_id)) for record in records]


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/v1/requests/timelines",
        handler=list_timelines,
        summary="The timelines of the last requests, and the engine's last steps",
        tag="system",
        answer=KeptTimelines,
    ),
    Endpoint(
        method="GET",
        path="/v1/requests/{request_id}/timeline",
        handler=get_timeline,
        summary="What happened to a request, and where its time went",
        tag="system",
        answer=RequestTimelines,
    ),
)
