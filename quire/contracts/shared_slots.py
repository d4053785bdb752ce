"""SharedSlots: the memory of a host tier, for other processes of this machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedSlots:
    """Memory that other processes may map: slots of `stride` bytes, one after the other, each with a page at its start.

    fd  of a file in memory that can only be read, whose size is fixed
    """

    fd: int
    num_slots: int
    stride: int
