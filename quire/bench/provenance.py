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
from quire.kernels.native import load_native

_CPU_LIST = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Provenance:
    """The machine and what ran on it.

    machine               the processor and its logical cores
    cpu_family, cpu_model, cpu_stepping  as the processor says, which its name often hides; None where the system does not say
    isa                   instruction set of the native kernels; None: torch ran
    commit                of the checkout that ran, "-dirty" with changes, or None
    """

    machine: str
    cpu_family: int | None
    cpu_model: int | None
    cpu_stepping: int | None
    isa: str | None
    num_threads: int
    version: str
    commit: str | None
    date: str


def find_provenance() -> Provenance:
    """Return the provenance of what is measured now, in this process."""
    cpu, native = _cpu_fields(), load_native()
    name = cpu.get("model name") or platform.processor() or platform.machine()
    family, model, stepping = (_number(cpu.get(field)) for field in ("cpu family", "model", "stepping"))
    return Provenance(
        machine=f"{name}, {os.cpu_count()} logical cores",
        cpu_family=family,
        cpu_model=model,
        cpu_stepping=stepping,
        isa=None if native is None else native.isa(),
        num_threads=torch.get_num_threads(),
        version=quire.__version__,
        commit=_commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _cpu_fields() -> dict[str, str]:
    """Return what the system says of the first processor, by its own names; nothing where it has no list of them."""
    if not _CPU_LIST.exists():
        return {}
    first = _CPU_LIST.read_text().partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _commit() -> str | None:
    root = Path(quire.__file__).parents[1]
    if not (root / ".git").exists():
        return None  # an installed package, perhaps inside a checkout of something else
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
