"""The environment of processes that run quire."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import quire


def environment_with_quire() -> dict[str, str]:
    """Return this process's environment, extended so that a child imports the same quire, even if it is not installed."""
    folder = str(Path(quire.__file__).resolve().parents[1])
    if folder in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return dict(os.environ)
    others = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": folder if not others else f"{folder}{os.pathsep}{others}"}


def is_launched_group() -> bool:
    """Return whether a launcher (torchrun, LeaderWorkerSet) has started this process as one of several ranks."""
    return int_variable("WORLD_SIZE", 1) > 1 or int_variable("LWS_GROUP_SIZE", 1) > 1


def int_variable(name: str, default: int) -> int:
    """Return an environment variable, or the default if it is not a number >= 0."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else default
