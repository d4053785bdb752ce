"""ResponseStore: responses in SQLite, each with its input items and the previous response; conversations next to them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quire.base.errors import ConfigError
from quire.base.logging import get_logger
from quire.serving.database import make_private_folder, open_database, transaction
from quire.serving.errors import ApiError, invalid, not_found
from quire.serving.responses.conversation_table import SCHEMA as CONVERSATION_SCHEMA
from quire.serving.responses.conversation_table import ConversationTable, check_history_bytes
from quire.serving.store_thread import StoreThread

R = TypeVar("R")
logger = get_logger(__name__)

SCHEMA_VERSION = 1
LIFETIME_S = 30 * 24 * 3600
PURGE_INTERVAL_S = 60.0
MAX_CHAIN = 1000
MAX_MEMORY_BYTES = 256 << 20
_SCHEMA = """
CREATE TABLE IF NOT EXISTS response(
  id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous_id TEXT, expires_at REAL NOT NULL, items BLOB NOT NULL,
  body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS response_by_expiry ON response(expires_at);
CREATE INDEX IF NOT EXISTS response_by_owner ON response(owner, expires_at);
"""
_SIZE = "length(items) + length(body)"
_ALL = f"""
SELECT id, owner, expires_at, {_SIZE} AS num_bytes FROM response
UNION ALL SELECT id, owner, expires_at, num_bytes FROM conversation
"""
_TABLES = ("response", "conversation")
_ANCESTORS = """
WITH RECURSIVE chain(id) AS (VALUES(?1) UNION SELECT r.previous_id FROM response r JOIN chain c ON r.id=c.id
  WHERE r.owner=?2 AND r.previous_id IS NOT NULL) SELECT id FROM chain
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One response.

    previous_id  of the previous response, None for none
    items        JSON: the items of its own input, with ids
    body         JSON: the response as it was sent
    """

    id: str
    previous_id: str | None
    items: bytes
    body: bytes


class ResponseTable:
    """The tables of responses and of conversations. Not thread-safe: call them from one thread.

    folder     None keeps all in memory
    max_bytes  of all owners; beyond it the oldest responses and conversations of the largest owner are removed; None for no
               limit
    limit_of   bytes of one owner; beyond it the owner's oldest responses and conversations are removed, but never the latest
    """

    def __init__(self, folder: Path | None, max_bytes: int | None, limit_of: Callable[[str], int]) -> None:
        self._max_bytes = max_bytes
        self._limit_of = limit_of
        self._purge_at = 0.0
        try:
            if folder is not None:
                make_private_folder(folder)
            name = None if folder is None else "responses.sqlite"
            self._db = open_database(folder or Path(), name, _SCHEMA + CONVERSATION_SCHEMA, SCHEMA_VERSION)
            self.conversations = ConversationTable(
                self._db, lambda owner, num_bytes, kept: self._grow(owner, num_bytes, {kept})
            )
            self.num_bytes = self.count_bytes()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"data_dir {folder}: {error}") from None

    def count_bytes(self) -> dict[str, int]:
        """Return the bytes by owner, as the database has them; `num_bytes` follows them."""
        return dict(self._db.execute(f"SELECT owner, SUM(num_bytes) FROM ({_ALL}) GROUP BY owner").fetchall())

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def put(self, owner: str, record: StoredResponse, now: float, conversation_id: str | None = None) -> None:
        """Insert a response; the expiry of all earlier responses of the conversation is extended to its own.

        conversation_id  where to append its input and its answer, if it has one
        """
        expires_at = now + LIFETIME_S
        num_bytes = len(record.items) + len(record.body)
        with transaction(self._db):
            if record.previous_id is not None:
                self._db.execute(
                    f"UPDATE response SET expires_at=max(expires_at, ?3) WHERE owner=?2 AND id IN ({_ANCESTORS})",
                    (record.previous_id, owner, expires_at),
                )
            self._db.execute(
                "INSERT INTO response VALUES(?,?,?,?,?,?)",
                (record.id, owner, record.previous_id, expires_at, record.items, record.body),
            )
            num_bytes += self._append(owner, conversation_id, record.items, record.body, now)
        self.purge(now)
        self._grow(owner, num_bytes, {record.id, conversation_id or ""})

    def append(self, owner: str, conversation_id: str, items: bytes, body: bytes, now: float) -> None:
        """Append the input and the answer of a response, which is not stored itself, to a conversation."""
        with transaction(self._db):
            num_bytes = self._append(owner, conversation_id, items, body, now)
        self._grow(owner, num_bytes, {conversation_id})

    def _append(self, owner: str, conversation_id: str | None, items: bytes, body: bytes, now: float) -> int:
        if conversation_id is None:
            return 0
        return self.conversations.append_answer(owner, conversation_id, items, body, now, now + LIFETIME_S)

    def purge(self, now: float) -> None:
        """Remove what has expired, once in a while."""
        if now < self._purge_at:
            return
        self._purge_at = now + PURGE_INTERVAL_S
        if sum(self._db.execute(f"DELETE FROM {name} WHERE expires_at <= ?", (now,)).rowcount for name in _TABLES):
            self.num_bytes = self.count_bytes()

    def _grow(self, owner: str, num_bytes: int, kept: Collection[str]) -> None:
        """Count bytes that an owner has more, and remove the oldest of what is over a limit, except `kept`."""
        self.num_bytes[owner] = self.num_bytes.get(owner, 0) + num_bytes
        if num_bytes <= 0:
            return
        self._trim(owner, self._limit_of(owner), kept)
        if self._max_bytes is not None:
            while (excess := sum(self.num_bytes.values()) - self._max_bytes) > 0:
                largest = max(self.num_bytes, key=self.num_bytes.__getitem__)
                if not self._trim(largest, max(0, self.num_bytes[largest] - excess), kept):
                    return

    def _trim(self, owner: str, max_bytes: int, kept: Collection[str]) -> bool:
        """Remove the oldest of an owner, except `kept`, while it has too many bytes; return whether any were removed."""
        num_dropped = 0
        listed = ",".join("?" * len(kept))
        oldest = f"SELECT id, num_bytes FROM ({_ALL}) WHERE owner=? AND id NOT IN ({listed}) ORDER BY expires_at LIMIT 64"
        values = (owner, *kept)
        while self.num_bytes.get(owner, 0) > max_bytes and (rows := self._db.execute(oldest, values).fetchall()):
            for removed_id, num_bytes in rows:
                if self.num_bytes[owner] <= max_bytes:
                    break
                for name in _TABLES:
                    self._db.execute(f"DELETE FROM {name} WHERE id=?", (removed_id,))
                self.num_bytes[owner] -= num_bytes
                num_dropped += 1
        return num_dropped > 0

    def replace(self, owner: str, response_id: str, body: bytes, now: float, conversation_id: str | None = None) -> bool:
        """Replace the body of a response; return whether it was still there.

        conversation_id  where to append its input and its answer, if it has one
        """
        with transaction(self._db):
            row = self._db.execute(
                "SELECT length(body), items FROM response WHERE id=? AND owner=?", (response_id, owner)
            ).fetchone()
            if row is None:
                return False
            self._db.execute("UPDATE response SET body=? WHERE id=? AND owner=?", (body, response_id, owner))
            num_bytes = len(body) - row[0] + self._append(owner, conversation_id, row[1], body, now)
        self._grow(owner, num_bytes, {response_id, conversation_id or ""})
        return True

    def get(self, owner: str, response_id: str, now: float) -> StoredResponse | None:
        """Return a response of an owner; None if there is none of this id."""
        row = self._db.execute(
            "SELECT id, previous_id, items, body FROM response WHERE id=? AND owner=? AND expires_at>?",
            (response_id, owner, now),
        ).fetchone()
        if row is None:
            return None
        return StoredResponse(id=row[0], previous_id=row[1], items=row[2], body=row[3])

    def history(self, owner: str, response_id: str, now: float) -> list[StoredResponse] | str:
        """Return a response and its predecessors, oldest first; if one is missing, return its id instead. Raises ApiError 400
        if they have too many bytes."""
        found: list[StoredResponse] = []
        num_bytes = 0
        next_id: str | None = response_id
        while next_id is not None and len(found) <= MAX_CHAIN:
            record = self.get(owner, next_id, now)
            if record is None:
                return next_id
            found.append(record)
            num_bytes += len(record.items) + len(record.body)
            check_history_bytes(num_bytes, "previous_response_id")
            next_id = record.previous_id
        return found[::-1]

    def delete(self, owner: str, response_id: str, now: float) -> bool:
        """Remove a response; return whether there was one."""
        sql = f"DELETE FROM response WHERE id=? AND owner=? AND expires_at>? RETURNING {_SIZE}"
        rows = self._db.execute(sql, (response_id, owner, now)).fetchall()
        for (num_bytes,) in rows:
            self.num_bytes[owner] -= num_bytes
        return bool(rows)


class ResponseStore:
    """Responses and conversations of all owners. A response is kept for 30 days after it, or the last response that continues
    it, was made; a conversation for 30 days after its last change.

    folder    the folder of responses.sqlite; None keeps them in memory, and removes the oldest if there are too many
    clock     seconds since the epoch
    limit_of  how many bytes an owner may have; beyond it its oldest responses are removed
    Raises ConfigError for a folder that cannot be used.
    """

    def __init__(
        self,
        folder: Path | None,
        clock: Callable[[], float] = time.time,
        max_memory_bytes: int = MAX_MEMORY_BYTES,
        limit_of: Callable[[str], int] = lambda owner: 1 << 62,
    ) -> None:
        self._clock = clock
        max_bytes = max_memory_bytes if folder is None else None
        self.thread = StoreThread(lambda: ResponseTable(folder, max_bytes, limit_of), "quire-responses", _storage_failed)
        self._call = self.thread.call

    async def close(self) -> None:
        """Close the database after pending calls; later calls are refused."""
        await self.thread.close(ResponseTable.close)

    async def put(self, owner: str, record: StoredResponse, conversation_id: str | None = None) -> None:
        """Store a response, and append it to a conversation. Raises ApiError 503 if the disk is full or broken."""
        await self._call(ResponseTable.put, owner, record, self._clock(), conversation_id)

    async def append(self, owner: str, conversation_id: str, items: bytes, body: bytes) -> None:
        """Append a response that is not stored to a conversation. Raises ApiError 503."""
        await self._call(ResponseTable.append, owner, conversation_id, items, body, self._clock())

    async def conversation(self, use: Callable[[ConversationTable, float, float], R]) -> R:
        """Run a function with the conversations, the time, and the time at which what is changed now expires. Raises ApiError,
        503 if the disk is full or broken."""
        now = self._clock()

        def run(table: ResponseTable) -> R:
            table.purge(now)
            return use(table.conversations, now, now + LIFETIME_S)

        return await self._call(run)

    async def replace(self, owner: str, response_id: str, body: bytes, conversation_id: str | None = None) -> bool:
        """Replace the body of a response, and append it to a conversation; return whether it was still there. Raises ApiError
        503."""
        return await self._call(ResponseTable.replace, owner, response_id, body, self._clock(), conversation_id)

    async def get(self, owner: str, response_id: str) -> StoredResponse:
        """Return a response. Raises ApiError 404."""
        record = await self._call(ResponseTable.get, owner, response_id, self._clock())
        if record is None:
            raise _missing(response_id, "response_id")
        return record

    async def history(self, owner: str, response_id: str) -> list[StoredResponse]:
        """Return a response and its predecessors, oldest first. Raises ApiError 404 if any of them is missing."""
        found = await self._call(ResponseTable.history, owner, response_id, self._clock())
        if isinstance(found, str):
            if found != response_id:
                raise not_found(
                    f"an earlier response of this conversation, {found!r}, is gone, so {response_id[:100]!r} cannot be "
                    "continued: send the items of the conversation as input",
                    param="previous_response_id",
                )
            raise _missing(found, "previous_response_id")
        if len(found) > MAX_CHAIN:
            raise invalid(f"a conversation may have {MAX_CHAIN} responses; send its items as input", "previous_response_id")
        return found

    async def delete(self, owner: str, response_id: str) -> None:
        """Remove a response. Raises ApiError 404."""
        if not await self._call(ResponseTable.delete, owner, response_id, self._clock()):
            raise _missing(response_id, "response_id")


def _storage_failed(error: BaseException) -> ApiError:
    logger.error("the response store failed: %s", error)
    message = "the server cannot store responses now; store false does without"
    return ApiError(503, message, code="storage_full", retry_after_s=60)


def _missing(response_id: str, param: str) -> ApiError:
    return not_found(f"there is no response {response_id[:100]!r}", param=param)
