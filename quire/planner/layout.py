"""Layout: how devices share a model, as "tp4xdp2"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.planner.hardware import HARDWARE, Hardware, find_hardware

_PART = re.compile(r"(tp|ep|homes|dcp|pcp|pp|dp)([1-9][0-9]{0,4})")
_CLUSTER = re.compile(r"(.+?)x([1-9][0-9]{0,4})")


@dataclass(frozen=True, slots=True)
class Layout:
    """How devices share a model.

    num_tensor    ranks that share every layer; has_whole_experts: each of them holds experts whole, the rest is sharded
    num_stages    pipeline stages
    num_replicas  that divide the sequences
    num_homes     groups of the tensor ranks that have whole attention weights for sequences of their own; 1: all divide them
    num_places    consecutive tensor ranks that share the tokens of a sequence (-dcp)
    num_parts     groups of tensor ranks that each have the whole model and compute parts of prompts (-pcp)
    """

    num_tensor: int = 1
    has_whole_experts: bool = False
    num_stages: int = 1
    num_replicas: int = 1
    num_homes: int = 1
    num_places: int = 1
    num_parts: int = 1

    def __post_init__(self) -> None:
        for name, count in (("homes", self.num_homes), ("dcp", self.num_places)):
            if self.num_tensor % count:
                raise ConfigError(f"{name}{count} must divide the {self.num_tensor} tensor ranks of layout {self.name}")
        kinds = {"homes": self.num_homes, "dcp": self.num_places, "pcp": self.num_parts, "pp": self.num_stages}
        given = {name for name, count in kinds.items() if count > 1}
        if self.has_whole_experts:
            given.add("ep")
        for name, others in (("homes", {"dcp", "pcp", "pp"}), ("pcp", {"dcp", "pp", "ep"})):
            if name in given and given & others:
                both = ", ".join(sorted(given & others))
                raise ConfigError(f"layout {self.name}: {name} cannot be combined with {both}, as in the engine")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Return the layout of "tp4", "ep8", "homes8", "dcp2", "pcp2", "pp2", "dp2" or several of them ("ep8xhomes8").
        Raises ConfigError."""
        found: dict[str, int] = {}
        for part in text.split("x"):
            match = _PART.fullmatch(part)
            if match is None or match[1] in found:
                raise ConfigError(
                    f"--layout must be tpN, epN (tensor-parallel ranks with whole experts), homesN, dcpN, pcpN, ppN, dpN, each "
                    f"once, or several with x between (tp4xdp2), got {text!r}"
                )
            found[match[1]] = int(match[2])
        if {"tp", "ep"} <= found.keys():
            raise ConfigError(f"--layout must have tp or ep: epN are N tensor-parallel ranks with whole experts; got {text!r}")
        sizes = (found.get(name, 1) for name in ("pp", "dp", "homes", "dcp", "pcp"))
        return cls(found.get("tp", found.get("ep", 1)), "ep" in found, *sizes)

    @property
    def num_devices(self) -> int:
        """Devices of all replicas."""
        return self.num_tensor * self.num_stages * self.num_replicas * self.num_parts

    @property
    def head_ranks(self) -> int:
        """Ranks that divide the attention heads of a token; those of a group with num_places count once for keys and values."""
        return self.num_tensor // self.num_homes

    def kv_share(self, num_kv_heads: int) -> float:
        """Return the part of the keys and values of a replica's sequences that a rank holds; heads are never cut."""
        groups = self.head_ranks // self.num_places
        return -(-num_kv_heads // groups) / num_kv_heads / (self.num_homes * self.num_places)

    @property
    def name(self) -> str:
        """As `parse` takes it."""
        kind = "ep" if self.has_whole_experts else "tp"
        parts = ((kind, self.num_tensor), ("homes", self.num_homes), ("dcp", self.num_places), ("pcp", self.num_parts))
        parts += (("pp", self.num_stages), ("dp", self.num_replicas))
        return "x".join(f"{name}{count}" for name, count in parts if count > 1) or "tp1"


def parse_cluster(text: str) -> tuple[Hardware, int]:
    """Return the device and the number of them of "H100x8"; one, if no number is given. Raises ConfigError."""
    match = None if text.lower() in HARDWARE else _CLUSTER.fullmatch(text)
    return (find_hardware(text), 1) if match is None else (find_hardware(match[1]), int(match[2]))


def usual_layouts(num_devices: int, is_mixture: bool) -> list[Layout]:
    """Return the layouts of all devices that use them in one way, or tensor ranks in replicas."""
    found = [Layout(num_tensor=num_devices)]
    if is_mixture:
        found.append(Layout(num_tensor=num_devices, has_whole_experts=True))
    if num_devices > 1:
        found += [Layout(num_stages=num_devices), Layout(num_replicas=num_devices)]
    half = num_devices // 2
    if num_devices >= 4 and num_devices % 2 == 0:
        found += [Layout(num_tensor=half, num_replicas=2), Layout(num_tensor=half, num_stages=2)]
    return found
