"""/v1/messages/batches: message batches of the Anthropic API, which are batches of the endpoint /v1/messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, cast

import msgspec

from quire.api.anthropic.batches import (
    BatchRequest,
    CreateMessageBatch,
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchList,
    MessageCounts,
)
from quire.serving.answers import Answer, Download, Ready
from quire.serving.batch.endpoints import BatchRoutes
from quire.serving.batch.lines import MAX_LINE_BYTES
from quire.serving.batch.records import ENDED, MESSAGES_ENDPOINT, BatchRecord, StoredAmount, is_id
from quire.serving.endpoint import Call, Endpoint, query
from quire.serving.errors import ApiError, invalid, not_found
from quire.serving.paging import ends_of, limit_query, page_limit

DEFAULT_LIMIT, MAX_LIMIT = 20, 1000
PART_LINES = 256


class _Body(msgspec.Struct):
    status_code: int
    request_id: str | None = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Error(msgspec.Struct):
    code: str | None = None
    message: str = ""
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


class _Line(msgspec.Struct):
    """A line of an output or error file of a batch."""

    custom_id: str
    response: _Body | None = None
    error: _Error | None = None


_read_line = msgspec.json.Decoder(_Line).decode
_read_error = msgspec.json.Decoder(_ErrorBody).decode


def result_line(line: bytes) -> bytes:
    """Return a line of the results for a line of an output or error file."""
    found = _read_line(line)
    return msgspec.json.encode({"custom_id": found.custom_id, "result": _result(found)}) + b"\n"


def _result(line: _Line) -> dict[str, Any]:
    if line.response is None:
        error = line.error or _Error()
        if error.code in ("batch_cancelled", "batch_expired"):
            return {"type": "canceled" if error.code == "batch_cancelled" else "expired"}
        return {"type": "errored", "error": ApiError(500, error.message, code=error.code).anthropic_body()}
    if line.response.status_code == 200:
        return {"type": "succeeded", "message": line.response.body}
    error = _read_error(line.response.body).error
    failure = ApiError(line.response.status_code, error.message, code=error.code, param=error.param)
    return {"type": "errored", "error": failure.anthropic_body(line.response.request_id)}


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _public_id(batch_id: str) -> str:
    return f"msg{batch_id}"


def message_batch(record: BatchRecord) -> MessageBatch:
    """Return a batch as the Anthropic API shows it."""
    is_ended = record.status in ENDED
    counts = MessageCounts(processing=0 if is_ended else record.num_lines)
    if is_ended:
        counts.succeeded, counts.errored = record.num_completed, record.num_failed - record.num_unrun
        if record.status == "cancelled":
            counts.canceled = record.num_unrun
        else:
            counts.expired = record.num_unrun
    ended_at = record.completed_at or record.failed_at or record.expired_at or record.cancelled_at
    public_id = _public_id(record.id)
    return MessageBatch(
        id=public_id,
        processing_status="ended" if is_ended else "canceling" if record.cancelling_at is not None else "in_progress",
        request_counts=counts,
        created_at=_time(record.created_at) or "",
        expires_at=_time(record.expires_at) or "",
        ended_at=_time(ended_at) if is_ended else None,
        cancel_initiated_at=_time(record.cancelling_at),
        results_url=f"/v1/messages/batches/{public_id}/results" if is_ended else None,
    )


def _answer(record: BatchRecord) -> Ready:
    return Ready(msgspec.json.encode(message_batch(record)))


def _own_id(text: str, param: str) -> str:
    """Return the id in the store for an id of the API. Raises ApiError 404."""
    own = text.removeprefix("msg")
    if not (text.startswith("msg") and is_id(own, "batch_")):
        raise not_found(f"there is no message batch {text[:100]!r}", param=param)
    return own


async def _found(routes: BatchRoutes, call: Call) -> BatchRecord:
    text = str(call.path_params["message_batch_id"])
    record = await routes.service.batch(call.owner.name, _own_id(text, "message_batch_id"))
    if not record.is_of_messages:
        raise not_found(f"there is no message batch {text[:100]!r}", param="message_batch_id")
    return record


def _input_of(requests: list[BatchRequest]) -> list[bytes]:
    """Return the input file of a batch in parts. Raises ApiError for an id that is there twice, and for a request that is too
    long."""
    seen: set[str] = set()
    parts: list[bytes] = []
    for position, request in enumerate(requests):
        where = f"requests[{position}]"
        if request.custom_id in seen:
            raise invalid(f"{where}.custom_id: {request.custom_id!r} is of an earlier request", f"{where}.custom_id")
        seen.add(request.custom_id)
        line = {"custom_id": request.custom_id, "method": "POST", "url": MESSAGES_ENDPOINT}
        # Raw keeps the line breaks of the body, and a line of a file has none.
        body = msgspec.json.format(bytes(request.params), indent=-1)
        encoded = msgspec.json.encode({**line, "body": msgspec.Raw(body)})
        if len(encoded) > MAX_LINE_BYTES:
            raise invalid(f"{where}.params: may have about {MAX_LINE_BYTES} bytes, got {len(body)}", f"{where}.params")
        parts.append(encoded + b"\n")
    return [b"".join(parts[at : at + PART_LINES]) for at in range(0, len(parts), PART_LINES)]


async def create_message_batch(routes: BatchRoutes, call: Call) -> Answer:
    """Create a message batch."""
    routes.server.check_accepting()
    body = await call.body(CreateMessageBatch)
    owner, service = call.owner.name, routes.service
    limit = StoredAmount(*routes.server.config.stored_limits(owner))
    parts = await asyncio.to_thread(_input_of, body.requests)

    async def pieces() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    async with service.room_for(owner, sum(map(len, parts)), limit):
        file = await service.add_file(owner, "message_batch.jsonl", "batch", pieces(), None, limit)
    try:
        record = await service.add_batch(owner, file.id, MESSAGES_ENDPOINT)
    except ApiError:
        await service.delete_file(owner, file.id)
        raise
    found = message_batch(record)
    found.request_counts.processing = len(body.requests)  # the lines are counted when they have been read
    return Ready(msgspec.json.encode(found))


async def list_message_batches(routes: BatchRoutes, call: Call) -> Answer:
    """List the caller's message batches."""
    limit = page_limit(call, DEFAULT_LIMIT, MAX_LIMIT)
    after, before = call.query.get("after_id"), call.query.get("before_id")
    if after is not None and before is not None:
        raise invalid("before_id cannot be used together with after_id; send one of them", "before_id")
    place = None if after is None and before is None else _own_id(after or before or "", "after_id" if after else "before_id")
    found, has_more = await routes.service.batches(
        call.owner.name, place, limit, of_messages=True, ascending=before is not None
    )
    page = [message_batch(record) for record in (reversed(found) if before is not None else found)]
    return Ready(msgspec.json.encode(MessageBatchList(page, has_more, *ends_of([batch.id for batch in page]))))


async def get_message_batch(routes: BatchRoutes, call: Call) -> Answer:
    """Describe a message batch."""
    return _answer(await _found(routes, call))


async def cancel_message_batch(routes: BatchRoutes, call: Call) -> Answer:
    """Cancel a message batch; one that is being cancelled is returned again."""
    record = await _found(routes, call)
    if record.status != "cancelling":
        record = await routes.service.cancel(call.owner.name, record.id)
    return _answer(await routes.service.batch(call.owner.name, record.id))


async def delete_message_batch(routes: BatchRoutes, call: Call) -> Answer:
    """Delete a message batch that has ended, with its results."""
    record = await _found(routes, call)
    await routes.service.delete_batch(record)
    return Ready(msgspec.json.encode(DeletedMessageBatch(_public_id(record.id))))


async def get_results(routes: BatchRoutes, call: Call) -> Answer:
    """Return the results of a message batch that has ended, one JSON object per line, those that succeeded first."""
    record = await _found(routes, call)
    if record.status not in ENDED:
        raise invalid("the batch has not ended; ask for its processing_status until it has", "message_batch_id")
    file_ids = [file_id for file_id in (record.output_file_id, record.error_file_id) if file_id is not None]
    for file_id in file_ids:
        await routes.service.file(call.owner.name, file_id)  # one that was deleted is a 404, before the answer begins
    return Download(_results(routes, call.owner.name, file_ids), {}, media_type="application/binary")


async def _results(routes: BatchRoutes, owner: str, file_ids: Sequence[str]) -> AsyncIterator[bytes]:
    for file_id in file_ids:
        rest = b""
        _, pieces = await routes.service.open_file(owner, file_id)
        async with aclosing(cast("AsyncGenerator[bytes]", pieces)) as parts:
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                if lines:
                    yield await asyncio.to_thread(_result_lines, lines)


def _result_lines(lines: Sequence[bytes]) -> bytes:
    return b"".join([result_line(line) for line in lines])


_ONE = "/v1/messages/batches/{message_batch_id}"


ENDPOINTS: tuple[Endpoint[BatchRoutes], ...] = (
    Endpoint(
        method="POST",
        path="/v1/messages/batches",
        handler=create_message_batch,
        summary="Run a batch of messages",
        tag="anthropic",
        body=CreateMessageBatch,
        answer=MessageBatch,
        error_style="anthropic",
    ),
    Endpoint(
        method="GET",
        path="/v1/messages/batches",
        handler=list_message_batches,
        summary="List message batches",
        tag="anthropic",
        answer=MessageBatchList,
        query=(
            query("after_id", {"type": "string"}),
            query("before_id", {"type": "string"}),
            limit_query(MAX_LIMIT),
        ),
        error_style="anthropic",
    ),
    Endpoint(
        method="GET",
        path=_ONE,
        handler=get_message_batch,
        summary="Describe a message batch",
        tag="anthropic",
        answer=MessageBatch,
        error_style="anthropic",
    ),
    Endpoint(
        method="DELETE",
        path=_ONE,
        handler=delete_message_batch,
        summary="Delete a message batch that has ended",
        tag="anthropic",
        answer=DeletedMessageBatch,
        error_style="anthropic",
    ),
    Endpoint(
        method="POST",
        path=f"{_ONE}/cancel",
        handler=cancel_message_batch,
        summary="Cancel a message batch",
        tag="anthropic",
        answer=MessageBatch,
        error_style="anthropic",
    ),
    Endpoint(
        method="GET",
        path=f"{_ONE}/results",
        handler=get_results,
        summary="Download the results of a message batch",
        tag="anthropic",
        success_media_type="application/binary",
        error_style="anthropic",
    ),
)
