"""Sizes of the CPU caches of this machine."""

from __future__ import annotations

from pathlib import Path

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def largest_cache_bytes(caches: Path = CACHES) -> int:
    """Return the size of the largest cache; 0 if the system does not report it."""
    largest = 0
    for file in caches.glob("index*/size"):
        text = file.read_text().strip()
        if text[:-1].isdigit() and text[-1] in _UNITS:
            largest = max(largest, int(text[:-1]) * _UNITS[text[-1]])
    return largest
