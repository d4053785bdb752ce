"""Bodies and answers of /v1/messages/batches."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_REQUESTS = 50_000


class BatchRequest(msgspec.Struct):
    """One request of a batch."""

    custom_id: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$", description="Names its result.")]
    params: Annotated[msgspec.Raw, Meta(description="The body of POST /v1/messages; it is checked when it runs.")]


class CreateMessageBatch(msgspec.Struct):
    """The body of POST /v1/messages/batches."""

    requests: Annotated[list[BatchRequest], Meta(min_length=1, max_length=MAX_REQUESTS)]


class MessageCounts(msgspec.Struct):
    """How many requests are in each state. They are `processing` until the whole batch has ended."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(msgspec.Struct, kw_only=True):
    """A message batch. Times are RFC 3339. results_url is a path, relative to where the client found this server."""

    id: str
    type: str = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None = None
    results_url: str | None


class MessageBatchList(msgspec.Struct):
    """A page of message batches."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(msgspec.Struct):
    """The answer to a deletion."""

    id: str
    type: str = "message_batch_deleted"
