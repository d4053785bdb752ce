"""Where a figure was made: machine, commit and date."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

import quire


@dataclass(frozen=True, slots=True)
class Provenance:
    """machine: the processor and its logical cores; commit: of the checkout that ran, "-dirty" with changes, or None."""

    machine: str
    num_threads: int
    version: str
    commit: str | None
    date: str


def find_provenance() -> Provenance:
    """Return the provenance of what is measured now, in this process."""
    return Provenance(
        machine=f"{_processor()}, {os.cpu_count()} logical cores",
        num_threads=torch.get_num_threads(),
        version=quire.__version__,
        commit=_commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    root = Path(quire.__file__).parents[1]
    if not (root / ".git").exists():
        return None  # an installed package, perhaps inside a checkout of something else
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
