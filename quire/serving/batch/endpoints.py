"""/v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from quire.api.openai.batches import BatchList, BatchObject, DeletedFile, FileList, FileObject
from quire.serving.answers import Answer, Download, Ready
from quire.serving.batch.records import MESSAGES_ENDPOINT, StoredAmount, is_id
from quire.serving.batch.room import Grow
from quire.serving.batch.service import BatchService, storage_failed
from quire.serving.context import ServerContext
from quire.serving.endpoint import Call, Endpoint, header, query
from quire.serving.errors import ApiError, invalid, not_found, too_large
from quire.serving.paging import AFTER_QUERY, ORDER_QUERY, ends_of, is_ascending, limit_query, page_limit

PART_BYTES = 1 << 20
MANY_FILES = 200  # longer lists are encoded in a thread
FORM_OVERHEAD_BYTES = 64 << 10  # the form's fields and boundaries
MAX_FIELD_BYTES = 4 << 10  # of fields other than files
MEMORY_BYTES = MultiPartParser.spool_max_size + FORM_OVERHEAD_BYTES
"""The part of an upload that is kept in memory; a longer file is on disk."""
MIN_LIFETIME_S, MAX_LIFETIME_S = 3600, 30 * 24 * 3600
MAX_FILENAME_LENGTH = 255
MAX_KEY_LENGTH = 256
MAX_FILES, DEFAULT_BATCHES, MAX_BATCHES = 10_000, 20, 100
"""Of a page."""

Lifetime = Annotated[int, msgspec.Meta(ge=MIN_LIFETIME_S, le=MAX_LIFETIME_S)]


class ExpiresAfter(msgspec.Struct):
    """When output files expire: seconds after their creation."""

    anchor: Literal["created_at"]
    seconds: Lifetime


class CreateBatch(msgspec.Struct):
    """The body of POST /v1/batches."""

    input_file_id: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    endpoint: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
            msgspec.Meta(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


@dataclass(slots=True)
class BatchRoutes:
    """The objects that the routes of files and batches use.

    opened  None until the engine is loaded for the first time
    """

    server: ServerContext
    opened: BatchService | None = None

    @property
    def service(self) -> BatchService:
        """The service. Raises ApiError 503 while there is none."""
        if self.opened is None:
            raise ApiError(503, "the batch store is not open yet", code="engine_unavailable", retry_after_s=1)
        return self.opened


def _json(body: object) -> Ready:
    return Ready(msgspec.json.encode(body))


def _id(call: Call, name: str, prefix: str) -> str:
    """Return the id in the path. An id that new_id cannot have made is refused before it reaches the store or the file
    system."""
    value = str(call.path_params[name])
    if not is_id(value, prefix):
        raise not_found(f"there is no {name.removesuffix('_id')} {value[:100]!r}", param=name)
    return value


async def upload_file(routes: BatchRoutes, call: Call) -> Answer:
    """Store a file."""
    routes.server.check_accepting()
    config = routes.server.config
    limit = StoredAmount(*config.stored_limits(call.owner.name))
    # Check before reading the upload.
    room = routes.service.room_for(call.owner.name, max(0, (call.content_length or 0) - FORM_OVERHEAD_BYTES), limit)
    async with room as grow, await _read_form(call, grow) as form:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise invalid("file must be an uploaded file", "file", "missing_required_parameter")
        if not isinstance(purpose, str):
            raise invalid("purpose must be a string", "purpose", "missing_required_parameter")
        if file.size is not None and file.size > config.max_file_bytes:
            raise too_large(config.max_file_bytes, file.size)
        record = await routes.service.add_file(call.owner.name, _filename(file), purpose, _parts(file), _lifetime(form), limit)
    return _json(record.as_json())


def _filename(file: UploadFile) -> str:
    """Return the name to show; it never becomes a path."""
    name = "".join(character for character in file.filename or "file" if character.isprintable())
    return name[:MAX_FILENAME_LENGTH] or "file"


def _lifetime(form: FormData) -> int | None:
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise invalid("expires_after[anchor] must be 'created_at'", "expires_after[anchor]")
    is_number = isinstance(seconds, str) and seconds.isascii() and seconds.isdigit() and len(seconds) < 10
    if not is_number or not MIN_LIFETIME_S <= int(str(seconds)) <= MAX_LIFETIME_S:
        raise invalid(
            f"expires_after[seconds] must be an integer from {MIN_LIFETIME_S} to {MAX_LIFETIME_S}", "expires_after[seconds]"
        )
    return int(str(seconds))


async def _parts(file: UploadFile) -> AsyncIterator[bytes]:
    while part := await file.read(PART_BYTES):
        yield part


async def _read_form(call: Call, grow: Grow) -> Any:
    """Return the multipart form as an asynchronous context manager; it is written to disk as it arrives, up to the limit.
    The part in memory counts in the BodyRoom; `grow` is called with the size so far.
    """
    request, limit = call.request, call.config.max_file_bytes + FORM_OVERHEAD_BYTES
    kind = request.headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise ApiError(415, f"content-type must be multipart/form-data, got {kind[:100]!r}", code="unsupported_media_type")
    length = call.content_length
    if length is not None:
        if length > limit:
            raise too_large(call.config.max_file_bytes, length)
        call.share.check(min(length, MEMORY_BYTES))

    async def limited() -> AsyncIterator[bytes]:
        num_bytes = num_kept = 0
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > limit:
                raise too_large(call.config.max_file_bytes, num_bytes)
            call.share.take(max(0, min(num_bytes, MEMORY_BYTES) - call.share.num_bytes))
            if num_bytes - num_kept > PART_BYTES:
                num_kept = num_bytes
                await grow(max(0, num_bytes - FORM_OVERHEAD_BYTES))
            yield part

    try:
        form = await MultiPartParser(
            request.headers,
            limited(),  # type: ignore[arg-type]
            max_files=1,
            max_fields=10,
            max_part_size=MAX_FIELD_BYTES,
        ).parse()
    except (MultiPartException, KeyError, UnicodeDecodeError) as error:
        raise invalid(f"file: this is not a valid form: {getattr(error, 'message', type(error).__name__)}", "file") from None
    except ClientDisconnect:
        raise ApiError(408, "the body did not arrive in full", code="request_timeout") from None
    except OSError as error:  # a large file is in the temporary folder while it arrives
        raise storage_failed(error) from error
    return _Closing(form)


class _Closing:
    """Closes a form's files on exit."""

    def __init__(self, form: FormData) -> None:
        self._form = form

    async def __aenter__(self) -> FormData:
        return self._form

    async def __aexit__(self, *_: object) -> None:
        await self._form.close()


async def list_files(routes: BatchRoutes, call: Call) -> Answer:
    """List the caller's files."""
    ascending, limit = is_ascending(call), page_limit(call, MAX_FILES, MAX_FILES)
    found, has_more = await routes.service.files(
        call.owner.name, call.query.get("purpose"), call.query.get("after"), limit, ascending
    )

    def page() -> Ready:
        return _json(
            FileList("list", [record.as_json() for record in found], *ends_of([record.id for record in found]), has_more)
        )

    return await asyncio.to_thread(page) if len(found) > MANY_FILES else page()


async def get_file(routes: BatchRoutes, call: Call) -> Answer:
    """Describe a file."""
    record = await routes.service.file(call.owner.name, _id(call, "file_id", "file-"))
    return _json(record.as_json())


async def get_file_content(routes: BatchRoutes, call: Call) -> Answer:
    """Return the bytes of a file."""
    record, pieces = await routes.service.open_file(call.owner.name, _id(call, "file_id", "file-"))
    disposition = f"attachment; filename*=UTF-8''{quote(record.filename, safe='')}"
    headers = {"content-disposition": disposition, "content-length": str(record.num_bytes)}
    return Download(pieces, headers)


async def delete_file(routes: BatchRoutes, call: Call) -> Answer:
    """Delete a file."""
    file_id = _id(call, "file_id", "file-")
    await routes.service.delete_file(call.owner.name, file_id)
    return _json(DeletedFile(file_id))


async def create_batch(routes: BatchRoutes, call: Call) -> Answer:
    """Create a batch."""
    routes.server.check_accepting()
    body = await call.body(CreateBatch)
    if body.endpoint == MESSAGES_ENDPOINT:
        raise invalid(f"endpoint: {body.endpoint} has batches of its own, POST /v1/messages/batches", "endpoint")
    key = call.request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= MAX_KEY_LENGTH:
        raise invalid(f"idempotency-key must have 1 to {MAX_KEY_LENGTH} characters, got {len(key)}", "idempotency-key")
    record = await routes.service.add_batch(
        call.owner.name,
        body.input_file_id,
        body.endpoint,
        metadata=body.metadata,
        output_lifetime_s=None if body.output_expires_after is None else body.output_expires_after.seconds,
        idempotency_key=key,
    )
    return _json(record.as_json())


async def list_batches(routes: BatchRoutes, call: Call) -> Answer:
    """List the caller's batches."""
    found, has_more = await routes.service.batches(
        call.owner.name, call.query.get("after"), page_limit(call, DEFAULT_BATCHES, MAX_BATCHES)
    )
    return _json(BatchList("list", [record.as_json() for record in found], *ends_of([record.id for record in found]), has_more))


async def get_batch(routes: BatchRoutes, call: Call) -> Answer:
    """Describe a batch."""
    record = await routes.service.batch(call.owner.name, _id(call, "batch_id", "batch_"))
    return _json(record.as_json())


async def cancel_batch(routes: BatchRoutes, call: Call) -> Answer:
    """Cancel a batch."""
    record = await routes.service.cancel(call.owner.name, _id(call, "batch_id", "batch_"))
    return _json(record.as_json())


_UPLOAD = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"type": "string", "enum": ["batch", "user_data"]},
                },
            }
        }
    },
}


_PURPOSE = query("purpose", {"type": "string"})

_IDEMPOTENCY_KEY = header(
    "idempotency-key",
    {"type": "string", "minLength": 1, "maxLength": MAX_KEY_LENGTH},
    "Sent again with the same key, the request returns the batch that it made.",
)

ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/files",
        handler=upload_file,
        summary="Upload a file",
        answer=FileObject,
        tag="files",
        request_body=_UPLOAD,
    ),
    Endpoint(
        method="GET",
        path="/v1/files",
        handler=list_files,
        summary="List files",
        answer=FileList,
        tag="files",
        query=(AFTER_QUERY, limit_query(MAX_FILES), ORDER_QUERY, _PURPOSE),
    ),
    Endpoint(
        method="GET", path="/v1/files/{file_id}", handler=get_file, summary="Describe a file", answer=FileObject, tag="files"
    ),
    Endpoint(
        method="GET",
        path="/v1/files/{file_id}/content",
        handler=get_file_content,
        summary="Download a file",
        tag="files",
        success_media_type="application/octet-stream",
    ),
    Endpoint(
        method="DELETE",
        path="/v1/files/{file_id}",
        handler=delete_file,
        summary="Delete a file",
        answer=DeletedFile,
        tag="files",
    ),
    Endpoint(
        method="POST",
        path="/v1/batches",
        handler=create_batch,
        summary="Run a file of requests",
        answer=BatchObject,
        tag="batches",
        body=CreateBatch,
        headers=(_IDEMPOTENCY_KEY,),
    ),
    Endpoint(
        method="GET",
        path="/v1/batches",
        handler=list_batches,
        summary="List batches",
        answer=BatchList,
        tag="batches",
        query=(AFTER_QUERY, limit_query(MAX_BATCHES)),
    ),
    Endpoint(
        method="GET",
        path="/v1/batches/{batch_id}",
        handler=get_batch,
        summary="Describe a batch",
        answer=BatchObject,
        tag="batches",
    ),
    Endpoint(
        method="POST",
        path="/v1/batches/{batch_id}/cancel",
        handler=cancel_batch,
        summary="Cancel a batch",
        answer=BatchObject,
        tag="batches",
    ),
)
