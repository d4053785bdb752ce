"""Run sections of a benchmark, each in a process of its own, so that one that crashes, hangs or takes all memory costs itself.

A section writes its rows as lines of JSON, each as soon as it is there; what it wrote counts whatever becomes of it. No torch.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Row = dict[str, object]
_LEFT_OUT = "left out: no time was left"


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a benchmark, and the most seconds it may take."""

    name: str
    limit_s: float


def run_section(section: Section, command: Sequence[str], rows_file: Path, left_s: float) -> list[Row]:
    """Run a section and return the rows that it wrote, and one that says so where it failed or was stopped.

    left_s  the seconds that are left for all sections: with less than half of its limit it is left out
    """
    limit_s = min(section.limit_s, left_s)
    if left_s < section.limit_s / 2:  # a later call has the time for it
        return [{"section": section.name, "error": _LEFT_OUT}]
    rows_file.unlink(missing_ok=True)
    output_file = rows_file.with_suffix(".txt")
    started = time.monotonic()
    with output_file.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, process_group=0)
        try:
            error = "" if process.wait(limit_s) == 0 else f"ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            error = f"stopped after {limit_s:.0f} s"
    rows = _read_rows(rows_file)
    if error:
        tail = output_file.read_text(errors="replace")[-2000:]  # all of it stays in the folder
        rows.append({"section": section.name, "error": error, "output": tail})
    return [*rows, {"section": section.name, "seconds": time.monotonic() - started}]


def _read_rows(file: Path) -> list[Row]:
    lines = file.read_text().splitlines() if file.exists() else []
    rows: list[Row] = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:  # the last line of a process that was stopped
            rows.append({"error": f"half a row: {line[:80]}"})
    return rows


def write_rows(rows: Iterator[Row], file: Path) -> None:
    """Append rows to a file as they come, in the process of a section."""
    with file.open("a") as out:
        for row in rows:
            out.write(json.dumps(row) + "\n")
            out.flush()


def run_all_sections(
    sections: Sequence[Section],
    command_of: Callable[[Section, list[Row]], Sequence[str]],
    folder: Path,
    budget_s: float,
    take: Callable[[Section, list[Row]], None],
) -> None:
    """Run sections one after the other within a time, and hand over the rows of each when it ends.

    command_of  of a section with the time that it has, and of the rows so far
    """
    deadline = time.monotonic() + budget_s
    found: list[Row] = []
    for section in sections:
        left_s = deadline - time.monotonic()
        command = command_of(replace(section, limit_s=min(section.limit_s, left_s)), found)
        rows = run_section(section, command, folder / f"{section.name}.jsonl", left_s)
        found += rows
        take(section, rows)


def is_measured(rows: Sequence[Row]) -> bool:
    """Return whether a section of a record has run, whatever became of it."""
    return any(row.get("error") != _LEFT_OUT for row in rows)


def record_text(record: Mapping[str, object]) -> str:
    """Return a record, of which each section is a list of rows, as JSON: rows with the same keys as a table, a row a line;
    five digits of numbers."""
    parts: list[str] = []
    for name, value in record.items():
        if isinstance(value, list):
            tables = (_table_text(keys, list(rows)) for keys, rows in itertools.groupby(value, tuple))
            parts.append(f"{json.dumps(name)}: [{', '.join(tables)}]")
        else:
            parts.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _table_text(keys: tuple[str, ...], rows: list[Row]) -> str:
    values = ([float(f"{value:.5g}") if isinstance(value, float) else value for value in row.values()] for row in rows)
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in values)
    return f'{{"keys": {json.dumps(keys)}, "rows": [\n{lines}]}}'


def read_record(text: str) -> dict[str, Any]:
    """Return the record that record_text wrote."""
    return {
        name: [dict(zip(table["keys"], row, strict=True)) for table in value for row in table["rows"]]
        if isinstance(value, list)
        else value
        for name, value in json.loads(text).items()
    }


def pack(folder: Path, archive: Path) -> None:
    """Write a folder as a compressed archive: of files few come back from a machine that is lent."""
    part = archive.with_suffix(".part")
    with tarfile.open(part, "w:gz") as packed:
        packed.add(folder, folder.name)
    part.replace(archive)
