"""`quire batch run`: reads a file of requests and writes a file of answers, with an engine and without a server.

Answers are appended as they arrive, so they survive an interruption, and the same command continues from them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from quire.base.errors import ConfigError
from quire.serving.answers import Ready
from quire.serving.batch.lines import CheckBody, LineSpan, body_of, url_of, validate
from quire.serving.batch.records import BatchRecord
from quire.serving.batch.runner import Execute, line_end, run_body

MAX_LINES = 10_000_000
MAX_SHOWN_ERRORS = 10
LIFETIME_S = 365 * 24 * 3600


@dataclass(slots=True)
class BatchProgress:
    """Progress of a run; num_done includes lines that were done by earlier runs."""

    num_lines: int
    num_done: int = 0
    num_failed: int = 0
    num_input_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """The files of one run: requests, answers, and failed requests."""

    input_path: Path
    output_path: Path
    error_path: Path


class _Known(msgspec.Struct):
    custom_id: str


def read_input(path: Path, endpoints: Collection[str], check_body: CheckBody) -> list[LineSpan]:
    """Return the positions of the lines. Raises ConfigError with the first errors if any line is invalid."""
    try:
        with path.open("rb") as file:
            found = validate(file, endpoints, check_body, MAX_LINES)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    if found.errors:
        shown = [f"line {error.line}: {error.message}" for error in found.errors[:MAX_SHOWN_ERRORS]]
        more = len(found.errors) - len(shown)
        rest = [f"and {more} more"] if more > 0 else []
        raise ConfigError(f"{path} is not valid, so nothing was run:\n  " + "\n  ".join([*shown, *rest]))
    return found.spans


def take_up(path: Path, is_overwriting: bool) -> set[str]:
    """Return the custom_ids in a file of answers. An incomplete last line is removed; with is_overwriting all lines are.
    Raises ConfigError if the file is not a file of answers.
    """
    if is_overwriting or not path.exists():
        path.write_bytes(b"")
        return set()
    known: set[str] = set()
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                known.add(msgspec.json.decode(line, type=_Known).custom_id)
            except ValueError:
                raise ConfigError(
                    f"{path} exists and is not a file of answers: give another --output-file, or --overwrite"
                ) from None
            end += len(line)
    os.truncate(path, end)
    return known


async def run_file(
    files: BatchFiles,
    spans: list[LineSpan],
    execute: Execute,
    window: int,
    *,
    is_overwriting: bool = False,
    on_progress: Callable[[BatchProgress], None] = lambda progress: None,
) -> BatchProgress:
    """Run every line without an answer, `window` at a time. Lines that failed in earlier runs are run again."""
    known = take_up(files.output_path, is_overwriting)
    take_up(files.error_path, is_overwriting=True)
    left = [span for span in spans if span.custom_id not in known]
    progress = BatchProgress(len(spans), len(spans) - len(left))
    on_progress(progress)
    now = int(time.time())
    record = BatchRecord(
        id="batch_offline",
        owner="anonymous",
        endpoint="",
        input_file_id="",
        completion_window="24h",
        status="in_progress",
        created_at=now,
        expires_at=now + LIFETIME_S,
    )
    queue: Iterator[LineSpan] = iter(left)
    with files.input_path.open("rb") as source, files.output_path.open("ab") as good, files.error_path.open("ab") as bad:
        run = _FileRun(source, good, bad, execute, record, progress, on_progress)
        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, min(window, len(left)))):
                group.create_task(run.work(queue))
    if progress.num_failed == 0:
        files.error_path.unlink()
    return progress


@dataclass(slots=True)
class _FileRun:
    source: BinaryIO
    good: BinaryIO
    bad: BinaryIO
    execute: Execute
    record: BatchRecord
    progress: BatchProgress
    on_progress: Callable[[BatchProgress], None]

    async def work(self, queue: Iterator[LineSpan]) -> None:
        """Run lines until none is left."""
        for span in queue:
            answer = await run_body(partial(self._run, span), repr(span.custom_id[:100]), _counter())
            self._save(span.custom_id, answer)

    async def _run(self, span: LineSpan) -> Ready:
        self.source.seek(span.offset)
        line = self.source.read(span.num_bytes)
        record = msgspec.structs.replace(self.record, endpoint=url_of(line))
        return await self.execute(record, body_of(line))

    def _save(self, custom_id: str, answer: Ready) -> None:
        end = line_end(custom_id, answer, repr(custom_id[:100]))
        file = self.good if end.is_success else self.bad
        file.write(end.result + b"\n")
        file.flush()
        progress = self.progress
        progress.num_done += 1
        progress.num_failed += not end.is_success
        progress.num_input_tokens += end.usage.input_tokens
        progress.num_output_tokens += end.usage.output_tokens
        self.on_progress(progress)


def _counter() -> Callable[[], Awaitable[int]]:
    count = 0

    async def count_try() -> int:
        nonlocal count
        count += 1
        return count

    return count_try
