"""Responses of /v1/files and /v1/batches, with the fields in the order of the API. Times are seconds since the epoch."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.api.openai.answers import CachedTokens, ReasoningTokens

FileStatus = Literal["uploading", "processed", "error"]
BatchStatus = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


class FileObject(msgspec.Struct, omit_defaults=True):
    """One file."""

    id: str
    object: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: FileStatus
    expires_at: int | None = None


class FileList(msgspec.Struct):
    """A page of files."""

    object: str
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct):
    """The response to a deletion."""

    id: str
    object: str = "file"
    deleted: bool = True


class BatchErrorItem(msgspec.Struct, frozen=True):
    """One validation error; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct):
    """Validation errors of an input file."""

    object: str
    data: list[BatchErrorItem]


class RequestCounts(msgspec.Struct):
    """Numbers of lines of a batch."""

    total: int
    completed: int
    failed: int


class BatchUsage(msgspec.Struct):
    """The token counts of all responses of a batch."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class BatchObject(msgspec.Struct, kw_only=True):
    """One batch."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None
    usage: BatchUsage


class BatchList(msgspec.Struct):
    """A page of batches."""

    object: str
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
