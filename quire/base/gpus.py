"""The visible GPUs, determined without loading a GPU library."""

from __future__ import annotations

import os
import re
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"
_DEVICE_FILE = re.compile(r"nvidia[0-9]+")


def visible_gpus(device_folder: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the names of the GPUs that CUDA makes visible to a process of this environment, as in CUDA_VISIBLE_DEVICES.

    These are indices, or the entries of the variable. As in CUDA, an index that does not exist hides all that follow it.
    """
    num_devices = sum(_DEVICE_FILE.fullmatch(name) is not None for name in os.listdir(device_folder))
    given = os.environ.get(VARIABLE)
    if num_devices == 0 or given is None:
        return tuple(map(str, range(num_devices)))
    found: list[str] = []
    for name in map(str.strip, given.split(",")):
        is_index = name.lstrip("-").isdecimal()
        if not name or (is_index and not 0 <= int(name) < num_devices):
            break
        found.append(name)
    return tuple(found)
