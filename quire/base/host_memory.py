"""The free memory of the machine or container."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path


def available_memory_bytes() -> int:
    """Return the memory that this process can still allocate: the system's, or the container's if that is less."""
    available = _meminfo_available()
    limit, usage = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and usage.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(usage.read_text())))
    return available


def _meminfo_available() -> int:
    path = Path("/proc/meminfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def release_free_memory() -> None:
    """Give memory that was freed, and that the C library keeps for later, back to the system, where the library can."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim is not None:
            trim(0)
