"""The machine and the checkout of a measurement, as far as they can be found without torch and the kernels."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import quire

_CPU_LIST = Path("/proc/cpuinfo")


def machine_name() -> str:
    """Return the name of the processor and its number of logical cores."""
    name = cpu_fields().get("model name") or platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} logical cores"


def cpu_fields() -> dict[str, str]:
    """Return the system's fields of the first processor; empty if there is no /proc/cpuinfo."""
    if not _CPU_LIST.exists():
        return {}
    first = _CPU_LIST.read_text().partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def find_commit() -> str | None:
    """Return the commit of the running checkout, with "-dirty" if it was changed; None for an installed package."""
    root = Path(quire.__file__).parents[1]
    if not (root / ".git").exists():
        return None  # possibly inside a checkout of something else
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
