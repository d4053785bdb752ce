"""The tables of the batch store."""

from __future__ import annotations

SCHEMA_VERSION = 1
"""Version of the tables. Missing indexes are created; versions that do not know them are not affected."""
IS_OPEN = "status NOT IN ('failed','completed','expired','cancelled')"
"""Condition for unfinished batches; SQLite uses the partial indexes only if a query has exactly this text."""
INPUT_FILE = "json_extract(CAST(record AS TEXT), '$.input_file_id')"
"""Of a batch."""
ENDED_AT = "json_extract(CAST(record AS TEXT), '$.' || status || '_at')"
"""The end time of an ended batch: its record has it under its status."""
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
