"""FileRecord and BatchRecord: the stored records and their API objects."""

from __future__ import annotations

import secrets

import msgspec

from quire.api.openai.answers import CachedTokens, ReasoningTokens
from quire.api.openai.batches import (
    BatchErrorItem,
    BatchErrors,
    BatchObject,
    BatchStatus,
    BatchUsage,
    FileObject,
    FileStatus,
    RequestCounts,
)

MESSAGES_ENDPOINT = "/v1/messages"
"""What the requests of message batches call; other batches do not."""
ENDED: frozenset[str] = frozenset({"failed", "completed", "expired", "cancelled"})
BATCH_LIFETIME_S = 30 * 24 * 3600
"""How long a batch is kept after its end, and by default its files."""
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
ID_LENGTH = 26


def new_id(prefix: str, replica_id: str = "") -> str:
    """Return an id, "file-" or "batch_" with 26 characters that need no quoting in URLs, file names or JSON: first those of
    the id of this server (at most 8), then random ones."""
    return prefix + replica_id + "".join(secrets.choice(_ALPHABET) for _ in range(ID_LENGTH - len(replica_id)))


def is_id(text: str, prefix: str) -> bool:
    """Whether a text has the form that new_id gives."""
    rest = text[len(prefix) :]
    return text.startswith(prefix) and len(rest) == ID_LENGTH and all(character in _ALPHABET for character in rest)


def output_file_id(batch_id: str, is_success: bool) -> str:
    """Return the id of a batch's output or error file: the batch's own characters, the last one changed."""
    text = batch_id.removeprefix("batch_")
    return f"file-{text[:-1]}{_ALPHABET[(_ALPHABET.index(text[-1]) + (1 if is_success else 2)) % len(_ALPHABET)]}"


class StoredAmount(msgspec.Struct, frozen=True):
    """The number and bytes of one owner's files, stored or allowed, including outputs of batches."""

    num_files: int = 0
    num_bytes: int = 0

    def plus(self, num_files: int, num_bytes: int) -> StoredAmount:
        """Return the sum."""
        return StoredAmount(self.num_files + num_files, self.num_bytes + num_bytes)

    def has_room_for(self, amount: StoredAmount) -> bool:
        """Whether this amount is within the limit."""
        return amount.num_files <= self.num_files and amount.num_bytes <= self.num_bytes


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One file; its bytes are stored next to the database under its id. Times are seconds since the epoch."""

    id: str
    owner: str
    purpose: str
    filename: str
    num_bytes: int
    created_at: int
    expires_at: int | None
    status: FileStatus

    def as_json(self) -> FileObject:
        """Return the file object of the API."""
        return FileObject(
            id=self.id,
            object="file",
            bytes=self.num_bytes,
            created_at=self.created_at,
            filename=self.filename,
            purpose=self.purpose,
            status=self.status,
            expires_at=self.expires_at,
        )


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One batch. The counts are of its lines; `end_status` is its status after its files are written;
    num_unrun counts the failed lines that did not run, because the batch expired or was cancelled."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    end_status: BatchStatus | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    errors: list[BatchErrorItem] | None = None
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    num_unrun: int = 0

    @property
    def is_of_messages(self) -> bool:
        """Whether it is a message batch of the Anthropic API."""
        return self.endpoint == MESSAGES_ENDPOINT

    def as_json(self) -> BatchObject:
        """Return the batch object of the API."""
        return BatchObject(
            id=self.id,
            endpoint=self.endpoint,
            errors=None if self.errors is None else BatchErrors("list", self.errors),
            input_file_id=self.input_file_id,
            completion_window=self.completion_window,
            status=self.status,
            output_file_id=self.output_file_id,
            error_file_id=self.error_file_id,
            created_at=self.created_at,
            in_progress_at=self.in_progress_at,
            expires_at=self.expires_at,
            finalizing_at=self.finalizing_at,
            completed_at=self.completed_at,
            failed_at=self.failed_at,
            expired_at=self.expired_at,
            cancelling_at=self.cancelling_at,
            cancelled_at=self.cancelled_at,
            request_counts=RequestCounts(self.num_lines, self.num_completed, self.num_failed),
            metadata=self.metadata,
            usage=BatchUsage(
                input_tokens=self.input_tokens,
                input_tokens_details=CachedTokens(self.cached_tokens),
                output_tokens=self.output_tokens,
                output_tokens_details=ReasoningTokens(self.reasoning_tokens),
                total_tokens=self.input_tokens + self.output_tokens,
            ),
        )
