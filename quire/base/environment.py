"""The environment of processes that run quire."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import quire


def environment_with_quire() -> dict[str, str]:
    """Return this process's environment, in which the same quire is found, also where it is not the installed one."""
    folder = str(Path(quire.__file__).resolve().parents[1])
    if folder in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return dict(os.environ)
    others = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": folder if not others else f"{folder}{os.pathsep}{others}"}


def is_launched_group() -> bool:
    """Return whether a launcher (torchrun, LeaderWorkerSet) says that this process is one of several ranks."""
    return int_variable("WORLD_SIZE", 1) > 1 or int_variable("LWS_GROUP_SIZE", 1) > 1


def int_variable(name: str, default: int) -> int:
    """Return an environment variable, or the default where it is not a number >= 0."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else default
