"""Provenance of a result: machine, commit and date."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import torch

import quire
from quire.bench.machine import cpu_fields, find_commit, machine_name
from quire.kernels.native import load_native


@dataclass(frozen=True, slots=True)
class Provenance:
    """The machine and the software of a measurement.

    machine               the processor and its logical cores
    cpu_family, cpu_model, cpu_stepping  numbers of the processor, which its name often hides; None if unknown
    isa                   instruction set of the native kernels; None: torch was used
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
    """Return the provenance of a measurement in this process."""
    cpu, native = cpu_fields(), load_native()
    family, model, stepping = (_number(cpu.get(field)) for field in ("cpu family", "model", "stepping"))
    return Provenance(
        machine=machine_name(),
        cpu_family=family,
        cpu_model=model,
        cpu_stepping=stepping,
        isa=None if native is None else native.isa(),
        num_threads=torch.get_num_threads(),
        version=quire.__version__,
        commit=find_commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
