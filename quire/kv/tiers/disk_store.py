"""DiskStore: pages in a folder, which several processes may share and which outlives them.

The folder has one file of fixed slots for each fingerprint (model, KV format, kernels), and an SQLite index of them all. A slot
is a header and the bytes of one page. Fixed slots make the size bound exact: a file grows by a slot only in a transaction that
has summed up the slots of all files.

What the index says is never trusted: a page counts only if its header has the key that was asked for, and the checksum that its
bytes have. So a torn page, a flipped byte, or a slot that another process has given to another page meanwhile is a miss.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
import stat
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError

VERSION = 1
MIN_DISK_BYTES = 32 << 20
INDEX_NAME = "index.sqlite"
_MAGIC = b"quireKV1"
_HEADER = struct.Struct("<8s16sQL28x")  # magic, key, bytes of the page, checksum of key and page
_ALIGNMENT = 4096
_OLD_S = 3600.0
"""A file of another fingerprint may be deleted when nobody has used it for so long."""
_LOCK_S = 10.0
_MAX_FOUND = 1 << 16
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, fingerprint TEXT NOT NULL,
    slot_bytes INTEGER NOT NULL, num_slots INTEGER NOT NULL, used_s REAL NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS slots (file INTEGER NOT NULL, slot INTEGER NOT NULL, key BLOB, writer TEXT, used_s REAL NOT NULL,
    PRIMARY KEY (file, slot)) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS by_key ON slots (file, key);
CREATE INDEX IF NOT EXISTS by_use ON slots (file, used_s)
"""


class DiskStore:
    """The pages of one fingerprint in a folder. One thread at a time uses it.

    num_damaged  pages that were found in the index, and had other bytes than their checksum says
    slot_bytes   of a page in the file, with its header
    """

    def __init__(self, folder: Path, max_bytes: int, fingerprint: Mapping[str, Any], page_bytes: int) -> None:
        """Open a folder, or make it. Raises ConfigError for one that cannot be used, OSError and sqlite3.Error."""
        if max_bytes < MIN_DISK_BYTES:
            raise ConfigError(f"kv_disk_bytes must be at least {MIN_DISK_BYTES}, got {max_bytes}")
        self.folder, self.page_bytes, self.num_damaged = folder, page_bytes, 0
        self.slot_bytes = -(-(_HEADER.size + page_bytes) // _ALIGNMENT) * _ALIGNMENT
        # The rest is for the index: its rows, and the log that SQLite keeps beside it.
        self._max_slot_bytes = max_bytes - (8 << 20) - max_bytes // 64
        self._writer = own_incarnation()
        self._found: dict[int, int] = {}  # slots of `find`, which `read` tries first
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_folder(folder)
        lock = lock_folder(folder, is_exclusive=False, timeout_s=_LOCK_S)
        if lock is None:
            raise ConfigError(f"kv_disk_dir {folder} is locked by `quire cache clear` for more than {_LOCK_S:g} s: try again")
        self._lock = lock
        try:
            self._db = open_index(folder)
        except BaseException:
            os.close(self._lock)
            raise
        try:
            self._fingerprint = json.dumps(dict(fingerprint), sort_keys=True)
            self._name = hashlib.sha256(self._fingerprint.encode()).hexdigest()[:32] + ".pages"
            self._remove_leftovers()
            self._register()
            self._descriptor = self._open_pages()
        except BaseException:
            self._db.close()
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Close the files."""
        os.close(self._descriptor)
        self._db.close()
        os.close(self._lock)

    def usage(self) -> tuple[int, int]:
        """Return the pages of this fingerprint, and the bytes of the slots of all fingerprints."""
        num_pages = self._db.execute("SELECT count(*) FROM slots WHERE file=? AND key IS NOT NULL", (self._file,)).fetchone()[0]
        return num_pages, self._db.execute("SELECT coalesce(sum(slot_bytes * num_slots), 0) FROM files").fetchone()[0]

    @property
    def max_bytes(self) -> int:
        """The most that the slots of all fingerprints may take."""
        return self._max_slot_bytes

    def find(self, keys: Sequence[int]) -> list[int]:
        """Return the keys, from the first on, whose pages the index has."""
        found: list[int] = []
        if len(self._found) > _MAX_FOUND:
            self._found.clear()
        for key in keys:
            slot = self.slot_of(key)
            if slot is None:
                break
            self._found[key] = slot
            found.append(key)
        return found

    def has(self, key: int) -> bool:
        """Return whether the index has a page."""
        return self.slot_of(key) is not None

    def read(self, key: int, into: Any) -> bool:
        """Read a page into a writable buffer of page_bytes; False, and anything in the buffer, where it is not there."""
        page, slot = memoryview(into).cast("B"), self._found.pop(key, None)
        if slot is not None and self._read_slot(slot, key, page):
            return True
        slot = self.slot_of(key)
        if slot is None:
            return False
        if not self._read_slot(slot, key, page):
            self.num_damaged += remove_page(self._db, self._file, slot, key)
            return False
        return True

    def _read_slot(self, slot: int, key: int, page: memoryview) -> bool:
        header = bytearray(_HEADER.size)
        num_bytes = os.preadv(self._descriptor, [header, page], slot * self.slot_bytes)
        return num_bytes == len(header) + len(page) and _is_right(header, page, key)

    def touch(self, keep_s: Mapping[int, float]) -> None:
        """Count the pages of some keys as used so many seconds from now."""
        now, query = time.time(), "UPDATE slots SET used_s=max(used_s, ?) WHERE file=? AND key=?"
        with transaction(self._db):
            self._db.execute("UPDATE files SET used_s=? WHERE id=?", (now, self._file))
            for key, kept_s in keep_s.items():
                self._db.execute(query, (now + kept_s, self._file, _key_bytes(key)))

    def write(self, pages: Sequence[tuple[int, Any]], keep_s: Mapping[int, float] | None = None) -> int:
        """Write pages, (key, buffer), in place of those that were not used for the longest time; return how many.

        keep_s  counts pages with these keys as used so many seconds later

        Raises OSError, for example where the disk is full: the pages are not entered then.
        """
        self._register_again()
        new = [(key, page) for key, page in dict(pages).items() if not self.has(key)]
        with transaction(self._db):
            slots = [slot for _ in new if (slot := self._take_slot()) is not None]
        try:
            for slot, (key, page) in zip(slots, new, strict=False):
                self._write_slot(slot, key, page)
        except BaseException:
            with transaction(self._db):
                self._free(slots)
            raise
        now, num_written = time.time(), 0
        kept: Mapping[int, float] = keep_s or {}
        with transaction(self._db):
            for slot, (key, _) in zip(slots, new, strict=False):
                cursor = self._db.execute(
                    "UPDATE OR IGNORE slots SET key=?, writer=NULL, used_s=? WHERE file=? AND slot=? AND writer=?",
                    (_key_bytes(key), now + kept.get(key, 0.0), self._file, slot, self._writer),
                )
                num_written += cursor.rowcount
                if cursor.rowcount == 0:  # another process was faster
                    self._free([slot])
        return num_written

    def _write_slot(self, slot: int, key: int, page: Any) -> None:
        data = memoryview(page).cast("B")
        if len(data) != self.page_bytes:
            raise ValueError(f"a page has {self.page_bytes} bytes, got {len(data)}")
        header = _HEADER.pack(_MAGIC, _key_bytes(key), self.page_bytes, zlib.crc32(data, zlib.crc32(_key_bytes(key))))
        buffers, offset = [header, data], slot * self.slot_bytes
        num_bytes = os.pwritev(self._descriptor, buffers, offset)
        if num_bytes != len(header) + len(data):
            raise OSError(f"only {num_bytes} of {len(header) + len(data)} bytes of a page were written to {self._name}")

    def slot_of(self, key: int) -> int | None:
        """Return the slot of a page in the file of pages, at slot * slot_bytes; None: there is no such page."""
        row = self._db.execute("SELECT slot FROM slots WHERE file=? AND key=?", (self._file, _key_bytes(key))).fetchone()
        # A damaged index may say anything.
        return row[0] if row is not None and 0 <= row[0] < self._max_slot_bytes // self.slot_bytes else None

    def _take_slot(self) -> int | None:
        """Return a slot to write, marked as being written by this process; inside of a transaction."""
        db, file = self._db, self._file
        row = db.execute("SELECT slot FROM slots WHERE file=? AND key IS NULL AND writer IS NULL LIMIT 1", (file,)).fetchone()
        if row is None:
            row = self._grow() or self._grow_after_deleting()
        if row is None:
            query = "SELECT slot FROM slots WHERE file=? AND key IS NOT NULL ORDER BY used_s LIMIT 1"
            row = db.execute(query, (file,)).fetchone()
        if row is None:
            return None
        if not 0 <= row[0] < self._max_slot_bytes // self.slot_bytes:
            raise sqlite3.DatabaseError(f"the index in {self.folder} has slot {row[0]}, which does not exist")
        values = (file, row[0], self._writer, time.time())
        db.execute("INSERT OR REPLACE INTO slots VALUES (?, ?, NULL, ?, ?)", values)
        return row[0]

    def _grow(self) -> tuple[int] | None:
        total = self._db.execute("SELECT coalesce(sum(slot_bytes * num_slots), 0) FROM files").fetchone()[0]
        if total + self.slot_bytes > self._max_slot_bytes:
            return None
        query = "UPDATE files SET num_slots=num_slots+1 WHERE id=? RETURNING num_slots-1"
        return self._db.execute(query, (self._file,)).fetchone()

    def _grow_after_deleting(self) -> tuple[int] | None:
        """Delete the file of another fingerprint that nobody has used for a while, and grow."""
        query = "SELECT id, name FROM files WHERE id != ? AND used_s < ? ORDER BY used_s LIMIT 1"
        row = self._db.execute(query, (self._file, time.time() - _OLD_S)).fetchone()
        if row is None:
            return None
        (self.folder / row[1]).unlink(missing_ok=True)
        self._db.execute("DELETE FROM slots WHERE file=?", (row[0],))
        self._db.execute("DELETE FROM files WHERE id=?", (row[0],))
        return self._grow()

    def _free(self, slots: Sequence[int]) -> None:
        query = "UPDATE slots SET key=NULL, writer=NULL WHERE file=? AND slot=? AND writer=?"
        for slot in slots:
            self._db.execute(query, (self._file, slot, self._writer))

    def _remove_leftovers(self) -> None:
        """Free the slots of writers that are gone, and delete files that the index does not know."""
        with transaction(self._db):
            writers = self._db.execute("SELECT DISTINCT writer FROM slots WHERE writer IS NOT NULL").fetchall()
            for (writer,) in writers:
                if not is_alive(writer):
                    self._db.execute("UPDATE slots SET writer=NULL WHERE writer=?", (writer,))
            known = {name for (name,) in self._db.execute("SELECT name FROM files")}
            for path in self.folder.glob("*.pages"):
                if path.name not in known:
                    path.unlink()

    def _open_pages(self) -> int:
        return os.open(self.folder / self._name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _register_again(self) -> None:
        """Begin anew where another process has deleted the file, because it was not used for long."""
        row = self._db.execute("SELECT 1 FROM files WHERE id=? AND name=?", (self._file, self._name)).fetchone()
        if row is None or os.fstat(self._descriptor).st_nlink == 0:
            os.close(self._descriptor)
            self._descriptor = self._open_pages()
            self._register()

    def _register(self) -> None:
        with transaction(self._db):
            values = (self._name, self._fingerprint, self.slot_bytes, time.time())
            self._db.execute("INSERT OR IGNORE INTO files VALUES (NULL, ?, ?, ?, 0, ?)", values)
            query = "UPDATE files SET used_s=? WHERE name=? RETURNING id"
            self._file: int = self._db.execute(query, (time.time(), self._name)).fetchone()[0]


def lock_folder(folder: Path, *, is_exclusive: bool, timeout_s: float) -> int | None:
    """Return a descriptor that locks a folder until it is closed; None where others lock it for longer than timeout_s.

    Whoever uses the pages shares the lock, whoever deletes the files has it for itself. It ends with its process.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if is_exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                os.close(descriptor)
                return None
            time.sleep(0.02)
        except BaseException:
            os.close(descriptor)
            raise
        else:
            return descriptor


def remove_page(db: sqlite3.Connection, file: int, slot: int, key: int) -> bool:
    """Free the slot of a damaged page; return whether the index still had the page there."""
    with transaction(db):
        return (
            db.execute("UPDATE slots SET key=NULL WHERE file=? AND slot=? AND key=?", (file, slot, _key_bytes(key))).rowcount
            > 0
        )


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless a folder belongs to this user, and nobody else may read it: pages are prompts."""
    try:
        status = folder.stat()
    except FileNotFoundError:
        raise ConfigError(f"kv_disk_dir {folder} does not exist") from None
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"kv_disk_dir {folder} is no folder")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"kv_disk_dir {folder} belongs to user {status.st_uid}, this is user {os.geteuid()}: give another one"
        )
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"kv_disk_dir {folder} has mode {mode:o}, so others may read what is in it: chmod it to 700")


def open_index(folder: Path) -> sqlite3.Connection:
    """Return a connection to the index of a folder. Raises ConfigError for one of another version, OSError, sqlite3.Error."""
    os.close(os.open(folder / INDEX_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    db = sqlite3.connect(folder / INDEX_NAME, isolation_level=None, check_same_thread=False, timeout=10)
    try:
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "wal_autocheckpoint=250", "journal_size_limit=1048576"):
            db.execute(f"PRAGMA {pragma}")
        found = db.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, VERSION):
            raise ConfigError(
                f"kv_disk_dir {folder} was written by another version of quire (format {found}, this one writes {VERSION}): "
                "give another folder, or empty it with `quire cache clear`"
            )
        problem = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise ConfigError(f"the index in kv_disk_dir {folder} is damaged: empty the folder with `quire cache clear`")
        with transaction(db):
            for statement in _SCHEMA.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version={VERSION}")
    except BaseException:
        db.close()
        raise
    return db


def is_page(data: bytes, key: int, page_bytes: int | None) -> bool:
    """Return whether the bytes of a slot begin with the page of a key; page_bytes: None: of any size."""
    if len(data) < _HEADER.size:
        return False
    num_bytes = _HEADER.unpack_from(data)[2]
    return (page_bytes is None or num_bytes == page_bytes) and _is_right(
        data[: _HEADER.size], memoryview(data)[_HEADER.size : _HEADER.size + num_bytes], key
    )


def _is_right(header: bytes | bytearray, page: memoryview, key: int) -> bool:
    magic, found_key, num_bytes, checksum = _HEADER.unpack(header)
    is_of_key = magic == _MAGIC and found_key == _key_bytes(key) and num_bytes == len(page)
    return is_of_key and zlib.crc32(page, zlib.crc32(found_key)) == checksum


def own_incarnation() -> str:
    """Return what tells this process from every other one, also from those that had or will have its id."""
    return f"{os.getpid()}:{_start_time(os.getpid())}"


def is_alive(incarnation: str) -> bool:
    """Return whether the process that own_incarnation was called in still runs, on this host."""
    pid, _, started = incarnation.partition(":")
    return _start_time(int(pid)) == started


def _start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _key_bytes(key: int) -> bytes:
    return key.to_bytes(16)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run a block as one transaction that writes; rolled back when it raises."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
