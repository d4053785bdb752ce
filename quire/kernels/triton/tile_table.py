"""TileTable: tile sizes for kernel launches by device, kernel and shape, from JSON. Looking them up does no tuning.

A file has tables, each for a device by its name and compute capability; each kernel has a list of {"when": ..., "tile": ...}.
The first entry whose conditions all hold applies: "max_x" and "min_x" bound a number x of the shape, others must be equal.
Conditions may also name what the GPU in use has: "shared_kib" for a program, and its "matrix_instruction" (DeviceTraits). The
defaults in tiles.json are for an H200, with smaller tiles for GPUs that need them. `quire tune` writes tables for its device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from quire.base.errors import ConfigError
from quire.base.logging import get_logger
from quire.kernels.triton.device_traits import DeviceTraits, device_traits

logger = get_logger(__name__)

SHIPPED = Path(__file__).with_name("tiles.json")
VARIABLE = "QUIRE_TILE_TABLE"
_VERSION = 2

Number = int | float | bool | str


class TileRule(NamedTuple):
    """Conditions on a shape, and the tile that applies if they hold."""

    when: Mapping[str, Number]
    tile: Mapping[str, int | bool]

    def holds(self, shape: Mapping[str, Number]) -> bool:
        """Return whether the rule applies to a shape; a condition on a number that the shape lacks never holds."""
        return all(_holds(name, wanted, shape) for name, wanted in self.when.items())


@dataclass(frozen=True, slots=True, eq=False)
class TileTable:
    """The rules of every kernel for one device, in order of precedence.

    device      its name in torch
    capability  such as "9.0"
    """

    device: str
    capability: str
    rules: Mapping[str, tuple[TileRule, ...]]

    def find(self, kernel: str, shape: Mapping[str, Number]) -> Mapping[str, int | bool]:
        """Return the tile of a kernel for a shape on the GPU in use. Raises ConfigError if no rule applies."""
        return _find(self, device_traits(), kernel, tuple(shape.items()))

    def over(self, other: TileTable) -> TileTable:
        """Return this table, with the rules of another appended."""
        kernels = dict.fromkeys((*self.rules, *other.rules))
        rules = {kernel: (*self.rules.get(kernel, ()), *other.rules.get(kernel, ())) for kernel in kernels}
        return TileTable(self.device, self.capability, rules)

    def to_json(self) -> dict[str, object]:
        """Return the contents of a file with only this table."""
        tiles = {
            kernel: [{"when": dict(rule.when), "tile": dict(rule.tile)} for rule in rules]
            for kernel, rules in self.rules.items()
        }
        table = {"device": self.device, "capability": self.capability, "tiles": tiles}
        return {"version": _VERSION, "tables": [table]}


@lru_cache(maxsize=4096)
def _find(
    table: TileTable, traits: DeviceTraits, kernel: str, items: tuple[tuple[str, Number], ...]
) -> Mapping[str, int | bool]:
    """Return the tile; remembered, as every layer of every step that is not captured asks for it."""
    shape = {"matrix_instruction": traits.matrix_instruction, "shared_kib": traits.shared_bytes >> 10, **dict(items)}
    for rule in table.rules.get(kernel, ()):
        if rule.holds(shape):
            return rule.tile
    raise ConfigError(
        f"the table of tiles for {table.device} has none for {kernel} with {shape}; create it again with quire tune"
    )


def read_tables(path: Path) -> list[TileTable]:
    """Return the tables of a file. Raises ConfigError if it is invalid."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the table of tiles {path} cannot be read ({error}); `quire tune` writes one") from error
    try:
        if found["version"] != _VERSION:
            raise ConfigError(
                f"the table of tiles {path} has version {found['version']!r}, not {_VERSION}; create it again with quire tune"
            )
        return [
            TileTable(str(table["device"]), str(table["capability"]), _read_rules(table["tiles"])) for table in found["tables"]
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"the table of tiles {path} has another form than `quire tune` writes: {error!r}") from error


def _read_rules(tiles: Mapping[str, Any]) -> dict[str, tuple[TileRule, ...]]:
    rules = {
        kernel: tuple(TileRule(dict(rule["when"]), dict(rule["tile"])) for rule in found) for kernel, found in tiles.items()
    }
    for kernel, found in rules.items():
        for rule in found:
            if not all(isinstance(value, int) and value >= 0 for value in rule.tile.values()):
                raise ValueError(f"a tile of {kernel} has numbers that are not whole: {dict(rule.tile)}")
    return rules


def _holds(name: str, wanted: Number, shape: Mapping[str, Number]) -> bool:
    bound, _, bounded = name.partition("_")
    if bound in ("max", "min") and bounded in shape:
        value = float(shape[bounded])
        return value <= float(wanted) if bound == "max" else value >= float(wanted)
    return name in shape and shape[name] == wanted


class _Active:
    """The table in use: one per process, whose kernels run on one kind of device; set before any launch."""

    table = read_tables(SHIPPED)[0]


def active_table() -> TileTable:
    """Return the table in use."""
    return _Active.table


@contextmanager
def using(table: TileTable) -> Iterator[None]:
    """Use another table within the context."""
    before, _Active.table = _Active.table, table
    try:
        yield
    finally:
        _Active.table = before


def user_path(device: str) -> Path:
    """Return the path of the table that `quire tune` writes for this user and a device."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = "".join(letter if letter.isalnum() else "-" for letter in device).lower()
    return root / "quire" / "tiles" / f"{name}.json"


def choose_table(device: str, capability: str, path: str | None = None, *, is_strict: bool = True) -> TileTable:
    """Select the table for a device for all further launches, and return it.

    path  a file; None: that of the environment variable QUIRE_TILE_TABLE, else the user's own, if it exists. Rules that it
          lacks come from the shipped tables: of the device, else of its capability, else the first

    Raises ConfigError if a file that was given has no table for the device or cannot be read; the user's own is then left
    out, and without is_strict any.
    """
    asked = path or os.environ.get(VARIABLE)
    shipped = _best(read_tables(SHIPPED), device, capability)
    table = shipped if shipped is not None else read_tables(SHIPPED)[0]
    own = Path(asked) if asked else user_path(device)
    if asked or own.is_file():
        try:
            tables = read_tables(own)
        except ConfigError as error:
            if asked and is_strict:
                raise
            logger.warning("tiles of %s are the shipped ones: %s", device, error)
            tables = []
        found = next((one for one in tables if one.device == device), None)
        if found is None and asked and is_strict:
            names = ", ".join(one.device for one in tables) or "none"
            raise ConfigError(f"the table of tiles {own} is for {names}, not for {device}: run `quire tune` there")
        if found is not None:
            logger.info("tiles of %s from %s", device, own)
            table = found.over(table)
    _Active.table = table
    return table


def _best(tables: list[TileTable], device: str, capability: str) -> TileTable | None:
    by_name = [table for table in tables if table.device == device]
    by_capability = [table for table in tables if table.capability == capability]
    return next(iter(by_name + by_capability), None)
