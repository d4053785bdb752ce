"""SQLite for the server's stores: one connection in one thread, a schema with a version, and transactions."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Generator
from pathlib import Path

from quire.base.errors import ConfigError


def make_private_folder(folder: Path) -> None:
    """Create a folder with mode 0700 if it is missing; parents get default modes. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def _make_private_file(path: Path) -> None:
    """Create a file if it is missing, and set its mode to 0600 if we own it. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        status = os.fstat(descriptor)
        if status.st_mode & 0o077 and status.st_uid == os.geteuid():
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def open_database(folder: Path, name: str | None, schema: str, version: int) -> sqlite3.Connection:
    """Return a connection to the file `name` in a folder, with the tables of `schema`; without a name to a database in memory.

    Other users cannot read the file, since it contains prompts and answers.
    Raises ConfigError, sqlite3.Error and OSError if it cannot be opened, or is of another version.
    """
    if name is not None:
        _make_private_file(folder / name)  # SQLite gives its journal files the mode of this file
        for extra in (folder / f"{name}-wal", folder / f"{name}-shm"):
            if extra.exists():
                _make_private_file(extra)
    db = sqlite3.connect(":memory:" if name is None else folder / name, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    db.execute("PRAGMA busy_timeout=5000")
    found = db.execute("PRAGMA user_version").fetchone()[0]
    if found not in (0, version):
        raise ConfigError(f"data_dir {folder} was written by another version of quire (schema {found}): give another one")
    with transaction(db):
        for statement in schema.split(";"):
            db.execute(statement)
        db.execute(f"PRAGMA user_version={version}")
    return db


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Generator[None]:
    """Run the block as one transaction."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # a full disk has already rolled it back; other errors have not
            db.execute("ROLLBACK")
        raise
