"""What `quire cache` does with the folder of a disk tier: count, check and delete its pages, also while engines use it."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.kv.tiers.disk_store import (
    INDEX_NAME,
    check_folder,
    is_alive,
    is_page,
    lock_folder,
    open_index,
    remove_page,
    transaction,
)

_CLEAR_S = 10.0
"""How long `clear_folder` waits for a moment in which no engine writes."""


@dataclass(frozen=True, slots=True)
class FileStats:
    """One file of the folder: what its pages are of, the pages in it, the bytes of all its slots, and its last use."""

    name: str
    fingerprint: dict[str, Any]
    num_pages: int
    num_bytes: int
    used_s: float


def check_cache_folder(folder: Path) -> None:
    """Raise ConfigError unless a folder is that of a disk tier, and belongs to this user."""
    check_folder(folder)
    if not (folder / INDEX_NAME).is_file():
        raise ConfigError(f"{folder} is not the folder of a disk tier: it has no file {INDEX_NAME}")


def is_in_use(folder: Path) -> bool:
    """Return whether an engine uses a folder now."""
    lock = lock_folder(folder, is_exclusive=True, timeout_s=0)
    if lock is not None:
        os.close(lock)
    return lock is None


def file_stats(folder: Path) -> list[FileStats]:
    """Return what is in a folder, the last used file first. Raises ConfigError, OSError and sqlite3.Error."""
    check_cache_folder(folder)
    db = open_index(folder)
    try:
        query = (
            "SELECT name, fingerprint, (SELECT count(*) FROM slots WHERE file=id AND key IS NOT NULL), slot_bytes * num_slots, "
            "used_s FROM files ORDER BY used_s DESC"
        )
        rows = db.execute(query).fetchall()
        return [FileStats(name, json.loads(text), pages, size, used_s) for name, text, pages, size, used_s in rows]
    finally:
        db.close()


def verify_pages(folder: Path, is_removed: bool = True) -> tuple[int, int]:
    """Read every page of a folder; return how many there are and how many of them are damaged, which are removed.

    A page that an engine replaces meanwhile counts as neither.
    """
    check_cache_folder(folder)
    db, num_pages, num_damaged = open_index(folder), 0, 0
    try:
        for file, name, slot_bytes in db.execute("SELECT id, name, slot_bytes FROM files").fetchall():
            for slot, key in db.execute("SELECT slot, key FROM slots WHERE file=? AND key IS NOT NULL", (file,)).fetchall():
                number = int.from_bytes(key)
                is_whole = _is_whole(folder / name, slot, slot_bytes, number)
                if not is_whole and not _is_there(db, file, slot, key):
                    continue
                num_pages += 1
                num_damaged += not is_whole
                if not is_whole and is_removed:
                    remove_page(db, file, slot, number)
    finally:
        db.close()
    return num_pages, num_damaged


def _is_whole(path: Path, slot: int, slot_bytes: int, key: int) -> bool:
    """Return whether a slot has a page whose checksum is right; a file that was deleted has none."""
    try:
        with path.open("rb", buffering=0) as file:
            return is_page(os.pread(file.fileno(), slot_bytes, slot * slot_bytes), key, None)
    except FileNotFoundError:
        return False


def _is_there(db: sqlite3.Connection, file: int, slot: int, key: bytes) -> bool:
    return db.execute("SELECT 1 FROM slots WHERE file=? AND slot=? AND key=?", (file, slot, key)).fetchone() is not None


def clear_folder(folder: Path) -> int:
    """Delete the pages in a folder; return the bytes that they took on the disk.

    Where no engine uses the folder, the index is deleted, too, of whatever version it is. Engines that use it go on with an
    empty folder. Raises ConfigError where they write all the time.
    """
    check_cache_folder(folder)
    lock = lock_folder(folder, is_exclusive=True, timeout_s=0)
    if lock is None:
        return _empty_files(folder)
    try:
        paths = [*folder.glob("*.pages"), *folder.glob(f"{INDEX_NAME}*")]
        num_bytes = sum(path.stat().st_blocks * 512 for path in paths)
        for path in paths:
            path.unlink()
        return num_bytes
    finally:
        os.close(lock)


def _empty_files(folder: Path) -> int:
    """Forget all pages and cut the files to nothing, in a moment in which no slot is being written."""
    db, deadline_s = open_index(folder), time.monotonic() + _CLEAR_S
    try:
        while True:
            with transaction(db):
                writers = db.execute("SELECT DISTINCT writer FROM slots WHERE writer IS NOT NULL").fetchall()
                if not any(is_alive(writer) for (writer,) in writers):
                    return _cut_files(folder, db)
            if time.monotonic() >= deadline_s:
                raise ConfigError(f"engines have written to {folder} for {_CLEAR_S:g} s without a pause: try again")
            time.sleep(0.02)
    finally:
        db.close()


def _cut_files(folder: Path, db: sqlite3.Connection) -> int:
    db.execute("DELETE FROM slots")
    db.execute("UPDATE files SET num_slots=0")
    num_bytes = 0
    for path in folder.glob("*.pages"):
        num_bytes += path.stat().st_blocks * 512
        os.truncate(path, 0)
    return num_bytes
