"""BatchStore: files, batches and lines in SQLite. Output files are made from the rows.

A line is finished when its row says so. Running lines are known only to the process, so a crash leaves nothing to repair.
Not thread-safe: one thread calls it (see service.py).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire.base.errors import ConfigError
from quire.base.logging import get_logger
from quire.serving.batch.lines import LineSpan
from quire.serving.batch.records import BATCH_LIFETIME_S, ENDED, BatchErrorItem, BatchRecord, FileRecord, StoredAmount, is_id
from quire.serving.batch.scratch import ScratchFolder, remove_abandoned
from quire.serving.database import make_private_folder, open_database, transaction

SCHEMA_VERSION = 1
"""Of the tables. Indexes are made where a file lacks them, and harm no version that does not know them."""
IS_OPEN = "status NOT IN ('failed','completed','expired','cancelled')"
"""Of batches that have not ended; a condition must have these words for the indexes of theirs to be used."""
INPUT_FILE = "json_extract(CAST(record AS TEXT), '$.input_file_id')"
"""Of a batch."""
ENDED_AT = "json_extract(CAST(record AS TEXT), '$.' || status || '_at')"
"""Of a batch that has ended: its record names the time after what it became."""
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS file(
  id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER, record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS file_by_owner ON file(owner, created_at);
CREATE TABLE IF NOT EXISTS batch(
  id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at INTEGER NOT NULL, status TEXT NOT NULL, idempotency_key TEXT,
  record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS batch_by_owner ON batch(owner, created_at);
CREATE UNIQUE INDEX IF NOT EXISTS batch_by_key ON batch(owner, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE TABLE IF NOT EXISTS line(
  batch_id TEXT NOT NULL, n INTEGER NOT NULL, custom_id TEXT NOT NULL, offset INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
  state INTEGER NOT NULL DEFAULT 0, tries INTEGER NOT NULL DEFAULT 0, result BLOB,
  input_tokens INTEGER DEFAULT 0, cached_tokens INTEGER DEFAULT 0, output_tokens INTEGER DEFAULT 0,
  reasoning_tokens INTEGER DEFAULT 0,
  PRIMARY KEY(batch_id, n)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS line_todo ON line(batch_id, n) WHERE state = 0;
CREATE INDEX IF NOT EXISTS batch_open ON batch(created_at) WHERE {IS_OPEN};
CREATE INDEX IF NOT EXISTS batch_open_by_input ON batch({INPUT_FILE}) WHERE {IS_OPEN};
CREATE INDEX IF NOT EXISTS batch_by_end ON batch({ENDED_AT}) WHERE NOT ({IS_OPEN});
CREATE INDEX IF NOT EXISTS file_by_expiry ON file(expires_at) WHERE expires_at IS NOT NULL;
"""


logger = get_logger(__name__)

ORPHAN_AGE_S = 3600
TODO, SUCCEEDED, FAILED = 0, 1, 2
_encode = msgspec.json.encode
_decode_file = msgspec.json.Decoder(FileRecord).decode
_decode_batch = msgspec.json.Decoder(BatchRecord).decode


class TokenUsage(msgspec.Struct, frozen=True):
    """The tokens of one line."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


NO_USAGE = TokenUsage()


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of a line: JSON for the output file, or for the error file if is_success is False."""

    batch_id: str
    n: int
    is_success: bool
    result: bytes
    usage: TokenUsage = NO_USAGE


@dataclass(frozen=True, slots=True)
class TodoLine:
    """A line that is to be run. tries: how often it was in flight when the engine died."""

    batch_id: str
    n: int
    custom_id: str
    offset: int
    num_bytes: int
    tries: int


class BatchStore:
    """See the module. With folder None everything is in memory and in a temporary folder, which is removed with the store."""

    def __init__(self, folder: Path | None) -> None:
        if folder is None:
            remove_abandoned()
        self._temporary = ScratchFolder() if folder is None else None
        base = self._temporary.path if self._temporary is not None else Path(folder or "")
        self._files = base / "files"
        try:
            make_private_folder(base)
            make_private_folder(self._files)
            self.database = open_database(base, None if folder is None else "batches.sqlite", SCHEMA, SCHEMA_VERSION)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"data_dir {base}: {error}") from None

    def close(self) -> None:
        """Close the database."""
        self.database.close()
        if self._temporary is not None:
            self._temporary.close()

    # Files.

    def path_of(self, file_id: str) -> Path:
        """Return where the bytes of a file are; only for ids that new_id made."""
        if not is_id(file_id, "file-"):
            raise ValueError("not a file id")
        return self._files / file_id

    @contextlib.contextmanager
    def writing(self, file_id: str) -> Iterator[BinaryIO]:
        """Open a new file for writing. It appears under its id only after all bytes are on disk."""
        path = self.path_of(file_id)
        temporary = path.with_suffix(".tmp")
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_folder(self._files)
        finally:
            temporary.unlink(missing_ok=True)

    def put_file(self, record: FileRecord) -> None:
        """Insert or replace a file's record."""
        with transaction(self.database):
            self._put_file(record)

    def add_file(self, record: FileRecord, limit: StoredAmount) -> StoredAmount | None:
        """Insert the record of a written file. If it exceeds its owner's limit, remove the file and return what the owner
        has."""
        with transaction(self.database):
            stored = self.stored(record.owner)
            if limit.has_room_for(stored.plus(1, record.num_bytes)):
                self._put_file(record)
                return None
        self.path_of(record.id).unlink(missing_ok=True)
        return stored

    def stored(self, owner: str) -> StoredAmount:
        """Return the number and bytes of an owner's files."""
        row = self.database.execute(
            "SELECT COUNT(*), COALESCE(SUM(json_extract(CAST(record AS TEXT), '$.num_bytes')), 0) FROM file WHERE owner=?",
            (owner,),
        ).fetchone()
        return StoredAmount(*row)

    def _put_file(self, record: FileRecord) -> None:
        self.database.execute(
            "INSERT INTO file VALUES(?,?,?,?,?) "
            "ON CONFLICT(id) DO UPDATE SET record=excluded.record, expires_at=excluded.expires_at",
            (record.id, record.owner, record.created_at, record.expires_at, _encode(record)),
        )

    def file(self, owner: str, file_id: str) -> FileRecord | None:
        """Return a file of an owner; None if there is none of this id."""
        row = self.database.execute("SELECT record FROM file WHERE id=? AND owner=?", (file_id, owner)).fetchone()
        return None if row is None else _decode_file(row[0])

    def files(self, owner: str, purpose: str | None, after: str | None, limit: int, ascending: bool) -> list[FileRecord] | None:
        """Return up to limit + 1 files of an owner (the last shows that there are more); None if `after` is not one of them."""
        if after is not None and self.file(owner, after) is None:
            return None
        rows = self._page("file", owner, after, ascending)
        found: list[FileRecord] = []
        for (blob,) in rows:
            record = _decode_file(blob)
            if purpose is None or record.purpose == purpose:
                found.append(record)
            if len(found) > limit:
                break
        return found

    def _page(self, table: str, owner: str, after: str | None, ascending: bool) -> Iterable[tuple[bytes]]:
        order, sign = ("ASC", ">") if ascending else ("DESC", "<")
        where, values = "owner=?", [owner]
        if after is not None:
            where += f" AND (created_at, rowid) {sign} (SELECT created_at, rowid FROM {table} WHERE id=? AND owner=?)"
            values += [after, owner]
        return self.database.execute(
            f"SELECT record FROM {table} WHERE {where} ORDER BY created_at {order}, rowid {order}",
            values,
        )

    def is_in_use(self, file_id: str) -> bool:
        """Whether a batch that has not ended reads this file."""
        rows = self.database.execute(f"SELECT 1 FROM batch WHERE {IS_OPEN} AND {INPUT_FILE}=? LIMIT 1", (file_id,))
        return rows.fetchone() is not None

    def delete_file(self, file_id: str) -> None:
        """Delete a file's record and its bytes."""
        with transaction(self.database):
            self.database.execute("DELETE FROM file WHERE id=?", (file_id,))
        self.path_of(file_id).unlink(missing_ok=True)

    # Batches.

    def add_batch(self, record: BatchRecord, idempotency_key: str | None, max_batches: int) -> BatchRecord | None:
        """Insert a batch. If the idempotency key is used, return the existing batch. None if the owner already has
        max_batches."""
        with transaction(self.database):
            if idempotency_key is not None:
                row = self.database.execute(
                    "SELECT record FROM batch WHERE owner=? AND idempotency_key=?", (record.owner, idempotency_key)
                ).fetchone()
                if row is not None:
                    return _decode_batch(row[0])
            num_stored = self.database.execute("SELECT COUNT(*) FROM batch WHERE owner=?", (record.owner,)).fetchone()[0]
            if num_stored >= max_batches:
                return None
            self.database.execute(
                "INSERT INTO batch VALUES(?,?,?,?,?,?)",
                (record.id, record.owner, record.created_at, record.status, idempotency_key, _encode(record)),
            )
        return record

    def batch(self, batch_id: str, owner: str | None = None) -> BatchRecord | None:
        """Return a batch with its current counts; None if the id is unknown or belongs to another owner."""
        row = self.database.execute("SELECT record FROM batch WHERE id=?", (batch_id,)).fetchone()
        record = None if row is None else _decode_batch(row[0])
        if record is None or (owner is not None and record.owner != owner):
            return None
        return record if record.status in ENDED else self._with_counts(record)

    def delete_batch(self, record: BatchRecord) -> None:
        """Delete the record of a batch that has ended, and its files, except one that another batch reads."""
        with transaction(self.database):
            self.database.execute("DELETE FROM batch WHERE id=?", (record.id,))
        for file_id in (record.input_file_id, record.output_file_id, record.error_file_id):
            if file_id is not None and not self.is_in_use(file_id):
                self.delete_file(file_id)

    def count_unrun(self, batch_id: str) -> int:
        """Return how many lines of a batch failed because it expired or was cancelled."""
        sql = "SELECT COUNT(*) FROM line WHERE batch_id=? AND state=? AND instr(result, ?)"
        return self.database.execute(sql, (batch_id, FAILED, b'"response":null,"error":{"code":"batch_')).fetchone()[0]

    def batches(
        self, owner: str, after: str | None, limit: int, of_messages: bool = False, ascending: bool = False
    ) -> list[BatchRecord] | None:
        """Return up to limit + 1 batches of an owner, message batches or the others, the newest first unless ascending; None if
        `after` is not one of them."""
        if after is not None and self.batch(after, owner) is None:
            return None
        found: list[BatchRecord] = []
        for (blob,) in self._page("batch", owner, after, ascending):
            record = _decode_batch(blob)
            if record.is_of_messages != of_messages:
                continue
            found.append(record if record.status in ENDED else self._with_counts(record))
            if len(found) > limit:
                break
        return found

    def unfinished(self) -> list[BatchRecord]:
        """Return the batches of all owners that have not ended, the oldest first."""
        rows = self.database.execute(f"SELECT record FROM batch WHERE {IS_OPEN} ORDER BY created_at, rowid")
        return [_decode_batch(blob) for (blob,) in rows.fetchall()]

    def change_batch(self, batch_id: str, **changes: Any) -> BatchRecord:
        """Change fields of a batch and return it."""
        with transaction(self.database):
            return self._change_batch(batch_id, changes)

    def _change_batch(self, batch_id: str, changes: dict[str, Any]) -> BatchRecord:
        row = self.database.execute("SELECT record FROM batch WHERE id=?", (batch_id,)).fetchone()
        record = msgspec.structs.replace(_decode_batch(row[0]), **changes)
        self.database.execute("UPDATE batch SET record=?, status=? WHERE id=?", (_encode(record), record.status, batch_id))
        return record

    def _with_counts(self, record: BatchRecord) -> BatchRecord:
        counts: dict[int, int] = {}
        usage = [0, 0, 0, 0]
        for state, count, *tokens in self.database.execute(
            "SELECT state, COUNT(*), SUM(input_tokens), SUM(cached_tokens), SUM(output_tokens), SUM(reasoning_tokens) "
            "FROM line WHERE batch_id=? GROUP BY state",
            (record.id,),
        ):
            counts[state] = count
            usage = [total + value for total, value in zip(usage, tokens, strict=True)]
        return msgspec.structs.replace(
            record,
            num_lines=sum(counts.values()),
            num_completed=counts.get(SUCCEEDED, 0),
            num_failed=counts.get(FAILED, 0),
            input_tokens=usage[0],
            cached_tokens=usage[1],
            output_tokens=usage[2],
            reasoning_tokens=usage[3],
        )

    # Lines.

    def start_batch(self, batch_id: str, spans: Sequence[LineSpan]) -> BatchRecord:
        """Insert all lines of a batch and mark it in progress, in one transaction."""
        with transaction(self.database):
            self.database.execute("DELETE FROM line WHERE batch_id=?", (batch_id,))
            self.database.executemany(
                "INSERT INTO line(batch_id, n, custom_id, offset, num_bytes) VALUES(?,?,?,?,?)",
                [(batch_id, span.number, span.custom_id, span.offset, span.num_bytes) for span in spans],
            )
            return self._change_batch(batch_id, {"status": "in_progress", "in_progress_at": int(time.time())})

    def fail_batch(self, batch_id: str, errors: Sequence[BatchErrorItem]) -> None:
        """End a batch whose input is not valid."""
        self.change_batch(batch_id, status="failed", failed_at=int(time.time()), errors=list(errors))

    def todo(self, batch_id: str, after: int, limit: int) -> list[TodoLine]:
        """Return the next lines to run, those with numbers above `after`."""
        rows = self.database.execute(
            "SELECT batch_id, n, custom_id, offset, num_bytes, tries FROM line WHERE batch_id=? AND state=0 AND n>? "
            "ORDER BY n LIMIT ?",
            (batch_id, after, limit),
        )
        return [TodoLine(*row) for row in rows]

    def read_line(self, file_id: str, line: TodoLine) -> bytes:
        """Return the bytes of a line."""
        with self.path_of(file_id).open("rb") as file:
            file.seek(line.offset)
            return file.read(line.num_bytes)

    def save_results(self, results: Sequence[LineResult]) -> None:
        """Save results of lines in one transaction; a line that has ended already keeps its first result."""
        with transaction(self.database):
            self.database.executemany(
                "UPDATE line SET state=?, result=?, input_tokens=?, cached_tokens=?, output_tokens=?, reasoning_tokens=? "
                "WHERE batch_id=? AND n=? AND state=0",
                [
                    (
                        SUCCEEDED if result.is_success else FAILED,
                        result.result,
                        *msgspec.structs.astuple(result.usage),
                        result.batch_id,
                        result.n,
                    )
                    for result in results
                ],
            )

    def count_try(self, batch_id: str, n: int) -> int:
        """Record that a line was running when the engine died; return how often that happened."""
        with transaction(self.database):
            self.database.execute("UPDATE line SET tries=tries+1 WHERE batch_id=? AND n=?", (batch_id, n))
            return self.database.execute("SELECT tries FROM line WHERE batch_id=? AND n=?", (batch_id, n)).fetchone()[0]

    def count_lines(self) -> dict[str, int]:
        """Return how many lines of unfinished batches are in each state."""
        found = dict(self.database.execute("SELECT state, COUNT(*) FROM line GROUP BY state").fetchall())
        return {name: found.get(state, 0) for name, state in (("todo", TODO), ("completed", SUCCEEDED), ("failed", FAILED))}

    def results(self, batch_id: str, is_success: bool, after: int, num_bytes: int) -> list[tuple[int, bytes]]:
        """Return (number, result) of the next lines with this outcome after number `after`, in order, up to about num_bytes."""
        state = SUCCEEDED if is_success else FAILED
        rows = self.database.execute(
            "SELECT n, result FROM line WHERE batch_id=? AND state=? AND n>? ORDER BY n", (batch_id, state, after)
        )
        found: list[tuple[int, bytes]] = []
        for n, result in rows:
            found.append((n, result))
            num_bytes -= len(result)
            if num_bytes <= 0:
                break
        return found

    def has_results(self, batch_id: str, is_success: bool) -> bool:
        """Whether any line has this outcome."""
        return bool(self.results(batch_id, is_success, after=-1, num_bytes=1))

    def end_batch(self, batch_id: str, outputs: Sequence[FileRecord], changes: dict[str, Any]) -> BatchRecord:
        """Insert the output files of a batch, end it and delete its lines, in one transaction."""
        with transaction(self.database):
            for record in outputs:
                self._put_file(record)
            counted = self._with_counts(self._change_batch(batch_id, changes))
            self.database.execute("UPDATE batch SET record=? WHERE id=?", (_encode(counted), batch_id))
            self.database.execute("DELETE FROM line WHERE batch_id=?", (batch_id,))
        return counted

    def delete_expired(self, now: float) -> None:
        """Delete the files that have expired and that no batch reads, and the batches that ended long ago."""
        ended = f"NOT ({IS_OPEN}) AND {ENDED_AT} <= ?"
        self.database.execute(f"DELETE FROM batch WHERE {ended}", (int(now) - BATCH_LIFETIME_S,))
        for (file_id,) in self.database.execute("SELECT id FROM file WHERE expires_at <= ?", (int(now),)).fetchall():
            if not self.is_in_use(file_id):
                self.delete_file(file_id)

    # After a restart.

    def tidy(self, now: float) -> None:
        """Remove expired files, partly written files, and rows whose bytes are missing."""
        self.delete_expired(now)
        known = {file_id for (file_id,) in self.database.execute("SELECT id FROM file")}
        for path in self._files.iterdir():
            if path.name not in known and now - path.stat().st_mtime > ORPHAN_AGE_S:
                logger.warning("removing %s, which no file record names", path.name)
                path.unlink(missing_ok=True)
        for file_id in known:
            if not self.path_of(file_id).exists():
                row = self.database.execute("SELECT record FROM file WHERE id=?", (file_id,)).fetchone()
                self.put_file(msgspec.structs.replace(_decode_file(row[0]), status="error"))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
