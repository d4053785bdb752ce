"""ConversationTable: conversations and their items, in the database of the stored responses."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.serving.database import transaction
from quire.serving.errors import ApiError, invalid, not_found
from quire.serving.openai.requests import make_id

MAX_ITEMS = 4096
"""Of one conversation: as many as a request may have messages."""
MAX_HISTORY_BYTES = 32 << 20
"""Of what a request continues: as many as its body may have by default."""
RECORD_BYTES = 256
"""What a conversation, and each of its items, counts for in addition to its text: empty ones fill the disk too."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS conversation(
  id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at INTEGER NOT NULL, expires_at REAL NOT NULL, metadata BLOB NOT NULL,
  num_bytes INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS conversation_by_expiry ON conversation(expires_at);
CREATE INDEX IF NOT EXISTS conversation_by_owner ON conversation(owner, expires_at);
CREATE TABLE IF NOT EXISTS conversation_item(
  conversation_id TEXT NOT NULL REFERENCES conversation(id) ON DELETE CASCADE, position INTEGER NOT NULL, id TEXT NOT NULL,
  item BLOB NOT NULL, PRIMARY KEY(conversation_id, position), UNIQUE(conversation_id, id))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConversation:
    """One conversation. metadata: JSON."""

    id: str
    created_at: int
    metadata: bytes


@dataclass(frozen=True, slots=True)
class StoredItems:
    """The items of a conversation as a JSON array. `body` is empty, where a stored response has its answer."""

    items: bytes
    body: bytes = b""


class _Ended(msgspec.Struct):
    status: str
    output: list[dict[str, Any]]


class ConversationTable:
    """The two tables. Not thread-safe: call it from the thread of the ResponseTable that shares the database.

    grow  is told the owner, by how many bytes a conversation has grown, and its id

    All methods raise ApiError 404 for a conversation that the owner does not have.
    """

    def __init__(self, db: sqlite3.Connection, grow: Callable[[str, int, str], None]) -> None:
        self._db = db
        self._grow = grow
        db.execute("PRAGMA foreign_keys=ON")

    def get(self, owner: str, conversation_id: str, now: float, param: str = "conversation_id") -> StoredConversation:
        """Return a conversation."""
        row = self._db.execute(
            "SELECT id, created_at, metadata FROM conversation WHERE id=? AND owner=? AND expires_at>?",
            (conversation_id, owner, now),
        ).fetchone()
        if row is None:
            raise not_found(f"there is no conversation {conversation_id[:100]!r}", param=param)
        return StoredConversation(id=row[0], created_at=row[1], metadata=row[2])

    def add(self, owner: str, conversation: StoredConversation, items: Sequence[dict[str, Any]], expires_at: float) -> None:
        """Insert a conversation with its first items."""
        num_bytes = RECORD_BYTES + len(conversation.metadata)
        with transaction(self._db):
            self._db.execute(
                "INSERT INTO conversation VALUES(?,?,?,?,?,?)",
                (conversation.id, owner, conversation.created_at, expires_at, conversation.metadata, num_bytes),
            )
            self._check_new(conversation.id, items)
            num_bytes += self._insert(conversation.id, items, expires_at)
        self._grow(owner, num_bytes, conversation.id)

    def update(self, owner: str, conversation_id: str, metadata: bytes, now: float, expires_at: float) -> StoredConversation:
        """Replace the metadata, and return the conversation."""
        with transaction(self._db):
            num_bytes = len(metadata) - len(self.get(owner, conversation_id, now).metadata)
            self._db.execute("UPDATE conversation SET metadata=? WHERE id=?", (metadata, conversation_id))
            self._touch(conversation_id, num_bytes, expires_at)
            found = self.get(owner, conversation_id, now)
        self._grow(owner, num_bytes, conversation_id)
        return found

    def delete(self, owner: str, conversation_id: str, now: float) -> None:
        """Delete a conversation with its items."""
        self.get(owner, conversation_id, now)
        sql = "DELETE FROM conversation WHERE id=? RETURNING num_bytes"
        for (num_bytes,) in self._db.execute(sql, (conversation_id,)).fetchall():
            self._grow(owner, -num_bytes, conversation_id)

    def add_items(
        self, owner: str, conversation_id: str, items: Sequence[dict[str, Any]], now: float, expires_at: float
    ) -> None:
        """Append items. Raises ApiError 400 for an id that the conversation has already, or too many items."""
        with transaction(self._db):
            self.get(owner, conversation_id, now)
            self._check_new(conversation_id, items)
            num_bytes = self._insert(conversation_id, items, expires_at)
        self._grow(owner, num_bytes, conversation_id)

    def append_answer(self, owner: str, conversation_id: str, items: bytes, body: bytes, now: float, expires_at: float) -> int:
        """Append the input and output of a response that has an answer, within a transaction; return their bytes.

        items, body  as of a StoredResponse

        Nothing is appended where the response failed or was cancelled, or the conversation has been deleted meanwhile. An item
        whose id is in the conversation already gets a new one.
        """
        ended = msgspec.json.decode(body, type=_Ended)
        if ended.status not in ("completed", "incomplete"):
            return 0
        try:
            self.get(owner, conversation_id, now)
        except ApiError:
            return 0
        new = [*msgspec.json.decode(items, type=list[dict[str, Any]]), *ended.output]
        seen: set[str] = set()
        for item in new:
            if item["id"] in seen or self._has(conversation_id, item["id"]):
                item["id"] = make_id(item["id"].partition("_")[0][:16] + "_")
            seen.add(item["id"])
        return self._insert(conversation_id, new, expires_at)

    def item(self, owner: str, conversation_id: str, item_id: str, now: float) -> bytes:
        """Return an item as JSON."""
        self.get(owner, conversation_id, now)
        row = self._db.execute(
            "SELECT item FROM conversation_item WHERE conversation_id=? AND id=?", (conversation_id, item_id)
        ).fetchone()
        if row is None:
            raise _no_item(item_id)
        return row[0]

    def delete_item(self, owner: str, conversation_id: str, item_id: str, now: float) -> StoredConversation:
        """Delete an item, and return its conversation."""
        found = self.get(owner, conversation_id, now)
        with transaction(self._db):
            rows = self._db.execute(
                "DELETE FROM conversation_item WHERE conversation_id=? AND id=? RETURNING length(item)",
                (conversation_id, item_id),
            ).fetchall()
            if not rows:
                raise _no_item(item_id)
            num_bytes = -rows[0][0] - RECORD_BYTES
            self._db.execute("UPDATE conversation SET num_bytes=num_bytes+? WHERE id=?", (num_bytes, conversation_id))
        self._grow(owner, num_bytes, conversation_id)
        return found

    def page(self, owner: str, conversation_id: str, after: str | None, limit: int, ascending: bool, now: float) -> list[bytes]:
        """Return up to limit + 1 items as JSON (the last shows that there are more). Raises ApiError 400 for an unknown
        `after`."""
        self.get(owner, conversation_id, now)
        order, sign = ("ASC", ">") if ascending else ("DESC", "<")
        where, values = "conversation_id=?", [conversation_id]
        if after is not None:
            if not self._has(conversation_id, after):
                raise invalid(f"after: there is no item {after[:100]!r}", "after")
            where += f" AND position {sign} (SELECT position FROM conversation_item WHERE conversation_id=? AND id=?)"
            values += [conversation_id, after]
        sql = f"SELECT item FROM conversation_item WHERE {where} ORDER BY position {order} LIMIT ?"
        return [item for (item,) in self._db.execute(sql, (*values, limit + 1))]

    def history(self, owner: str, conversation_id: str, now: float) -> StoredItems:
        """Return all items, for a response that continues them. Raises ApiError 400 for a conversation that is full, or has
        more than MAX_HISTORY_BYTES."""
        self.get(owner, conversation_id, now, "conversation")
        sql = "SELECT COUNT(*), COALESCE(SUM(length(item)), 0) FROM conversation_item WHERE conversation_id=?"
        num_items, num_bytes = self._db.execute(sql, (conversation_id,)).fetchone()
        if num_items >= MAX_ITEMS:
            raise _full(conversation_id, "conversation")
        check_history_bytes(num_bytes, "conversation")
        sql = "SELECT item FROM conversation_item WHERE conversation_id=? ORDER BY position"
        items = [item for (item,) in self._db.execute(sql, (conversation_id,))]
        return StoredItems(b"[" + b",".join(items) + b"]")

    def _has(self, conversation_id: str, item_id: str) -> bool:
        sql = "SELECT 1 FROM conversation_item WHERE conversation_id=? AND id=?"
        return self._db.execute(sql, (conversation_id, item_id)).fetchone() is not None

    def _check_new(self, conversation_id: str, items: Sequence[dict[str, Any]]) -> None:
        seen: set[str] = set()
        for position, item in enumerate(items):
            if item["id"] in seen or self._has(conversation_id, item["id"]):
                where = f"items[{position}].id"
                raise invalid(f"{where}: the conversation has an item {item['id'][:100]!r} already; leave the id out", where)
            seen.add(item["id"])
        sql = "SELECT COUNT(*) FROM conversation_item WHERE conversation_id=?"
        if self._db.execute(sql, (conversation_id,)).fetchone()[0] + len(items) > MAX_ITEMS:
            raise _full(conversation_id, "items")

    def _insert(self, conversation_id: str, items: Sequence[dict[str, Any]], expires_at: float) -> int:
        sql = "SELECT COALESCE(MAX(position), 0) FROM conversation_item WHERE conversation_id=?"
        last = self._db.execute(sql, (conversation_id,)).fetchone()[0]
        encoded = [(item["id"], msgspec.json.encode(item)) for item in items]
        self._db.executemany(
            "INSERT INTO conversation_item VALUES(?,?,?,?)",
            [(conversation_id, last + 1 + at, item_id, item) for at, (item_id, item) in enumerate(encoded)],
        )
        num_bytes = sum(len(item) + RECORD_BYTES for _, item in encoded)
        self._touch(conversation_id, num_bytes, expires_at)
        return num_bytes

    def _touch(self, conversation_id: str, num_bytes: int, expires_at: float) -> None:
        sql = "UPDATE conversation SET num_bytes=num_bytes+?, expires_at=? WHERE id=?"
        self._db.execute(sql, (num_bytes, expires_at, conversation_id))


def check_history_bytes(num_bytes: int, param: str) -> None:
    """Raise ApiError 400 if what a request continues has more than MAX_HISTORY_BYTES."""
    if num_bytes > MAX_HISTORY_BYTES:
        message = (
            f"{param}: what a request continues may have {MAX_HISTORY_BYTES} bytes, got {num_bytes} or more; begin a new one"
        )
        raise invalid(message, param, "conversation_full")


def _no_item(item_id: str) -> ApiError:
    return not_found(f"there is no item {item_id[:100]!r} in this conversation", param="item_id")


def _full(conversation_id: str, param: str) -> ApiError:
    message = f"{param}: a conversation may have {MAX_ITEMS} items; delete some of {conversation_id!r}, or create another"
    return invalid(message, param, "conversation_full")
