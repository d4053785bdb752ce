"""Traces of real load: rows of arrival time, prompt length, output length, and ids of equal blocks of prompts.

Two formats are supported: CSV with a header TIMESTAMP,ContextTokens,GeneratedTokens and times of day; JSON lines with
`timestamp` in milliseconds, `input_length`, `output_length` and `hash_ids`, one id per block of the prompt: equal ids at the
same index mean equal tokens up to there.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError

_USUAL_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request: seconds since the trace's start, tokens of prompt and output, ids of the prompt's blocks (or none)."""

    time_s: float
    num_input_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in order of time, the first at 0. block_tokens: tokens per hash id; None without ids."""

    rows: tuple[TraceRow, ...]
    block_tokens: int | None = None


def read_trace(path: Path, duration_s: float | None = None, max_requests: int | None = None) -> Trace:
    """Return the trace in a file, limited to duration_s of its own time and to max_requests.

    Rows without prompt or output tokens are skipped, because they are not valid requests. Raises ConfigError, with the line, if
    the file cannot be read or has neither format.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            rows = _read_json(file, path) if first.lstrip().startswith("{") else _read_csv(file, path)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read ({error})") from error
    rows = sorted((row for row in rows if row.num_input_tokens and row.num_output_tokens), key=lambda row: row.time_s)
    if not rows:
        raise ConfigError(f"the trace {path} has no request with prompt and output tokens")
    block_tokens = infer_block_tokens(rows, path)
    start = rows[0].time_s
    shifted = [TraceRow(row.time_s - start, row.num_input_tokens, row.num_output_tokens, row.hash_ids) for row in rows]
    if duration_s is not None:
        shifted = [row for row in shifted if row.time_s < duration_s]
    return Trace(tuple(shifted[:max_requests]), block_tokens)


def infer_block_tokens(rows: Sequence[TraceRow], path: Path) -> int | None:
    """Return the block size with which every row has ceil(num_input_tokens / size) ids: 512 if it fits, else the largest
    power of two that fits, else the smallest size. None if no row has ids. Raises ConfigError if no size fits."""
    least, most = 1, math.inf
    num_with_ids = 0
    for row in rows:
        num_ids = len(row.hash_ids)
        if num_ids:
            num_with_ids += 1
            least = max(least, -(-row.num_input_tokens // num_ids))
            if num_ids > 1:
                most = min(most, -(-row.num_input_tokens // (num_ids - 1)) - 1)
    if not num_with_ids:
        return None
    if least > most:
        raise ConfigError(
            f"the trace {path}: no block size explains the hash_ids: some rows need at least {least} tokens a block, "
            f"others at most {most:g}"
        )
    if least <= _USUAL_BLOCK_TOKENS <= most:
        return _USUAL_BLOCK_TOKENS
    power = 1 << (least - 1).bit_length() if math.isinf(most) else 1 << (int(most).bit_length() - 1)
    return power if least <= power <= most else least


def _read_json(lines: Iterable[str], path: Path) -> list[TraceRow]:
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(_json_row(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"the trace {path}, line {number}: needs numbers timestamp, input_length and output_length, and perhaps a "
                f"list hash_ids ({type(error).__name__}: {error})"
            ) from error
    return rows


def _json_row(row: dict[str, Any]) -> TraceRow:
    ids = row.get("hash_ids") or ()
    return TraceRow(
        _finite(row["timestamp"]) / 1000.0, _count(row["input_length"]), _count(row["output_length"]), tuple(map(int, ids))
    )


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a time")
    return number


def _count(value: Any) -> int:
    number = int(value)
    if number < 0:
        raise ValueError(f"{value!r} is not a number of tokens")
    return number


def _read_csv(lines: Iterable[str], path: Path) -> list[TraceRow]:
    reader = csv.DictReader(lines)
    wanted = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    if reader.fieldnames is None or any(name not in reader.fieldnames for name in wanted):
        raise ConfigError(
            f"the trace {path} is not a trace: it has neither the CSV header {','.join(wanted)} nor JSON lines with "
            "timestamp, input_length and output_length"
        )
    rows = []
    for row in reader:
        try:
            rows.append(TraceRow(_seconds(row[wanted[0]]), _count(row[wanted[1]]), _count(row[wanted[2]])))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the trace {path}, line {reader.line_num}: {error}") from error
    return rows


def _seconds(text: str) -> float:
    """Return a time of day with seven decimals, one more than datetime supports, in seconds."""
    whole, _, fraction = text.strip().partition(".")
    digits, zone = fraction.rstrip("Zz"), fraction[len(fraction.rstrip("Zz")) :]
    for sign in "+-":
        if sign in digits:
            digits, rest = digits.split(sign, 1)
            zone = sign + rest
    moment = datetime.fromisoformat(whole + zone)
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return moment.timestamp() + (float(f"0.{digits}") if digits else 0.0)
