"""A progress bar for long measurements."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm


def progress_bar(total: int, unit: str, is_shown: bool) -> tqdm[Any]:
    """Return a progress bar on standard error, which shows nothing if that is no terminal, or if is_shown is False."""
    return tqdm(total=total, unit=unit, disable=None if is_shown else True, dynamic_ncols=True, leave=False)
