"""SQLite as the server's stores use it: one connection of one thread, a schema with a version, whole transactions."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Generator
from pathlib import Path

from quire.base.errors import ConfigError


def open_database(folder: Path, name: str | None, schema: str, version: int) -> sqlite3.Connection:
    """Return a connection to the file `name` in a folder, with the tables of `schema`; without a name to a database in memory.

    Raises ConfigError, sqlite3.Error and OSError where it cannot be opened, and for a file of another version.
    """
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
    """Commit what is done inside, or nothing of it."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # a full disk has ended it already, another error has not
            db.execute("ROLLBACK")
        raise
