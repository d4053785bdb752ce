"""The machine and the checkout that a figure was made on, as far as neither torch nor the kernels are needed to tell."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import quire

_CPU_LIST = Path("/proc/cpuinfo")


def machine_name() -> str:
    """Return the processor and its logical cores."""
    name = cpu_fields().get("model name") or platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} logical cores"


def cpu_fields() -> dict[str, str]:
    """Return what the system says of the first processor, by its own names; nothing where it has no list of them."""
    if not _CPU_LIST.exists():
        return {}
    first = _CPU_LIST.read_text().partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def find_commit() -> str | None:
    """Return the commit of the checkout that runs, with "-dirty" where it was changed; None for an installed package."""
    root = Path(quire.__file__).parents[1]
    if not (root / ".git").exists():
        return None  # perhaps inside a checkout of something else
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
