"""Files of expert placements and of expert loads, in JSON: by layer the experts of each rank, or the tokens of each expert."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import ConfigError
from quire.parallel.expert_placement import ExpertPlacement

_PLACEMENT, _LOAD = "expert placement", "expert load"
_MAX_BYTES = 64 << 20


def write_placements(path: str, placements: Mapping[int, ExpertPlacement]) -> None:
    """Write the placement of each layer, by its index in the model."""
    _write(path, _PLACEMENT, {layer: [list(experts) for experts in each.ranks] for layer, each in placements.items()})


def read_placements(path: str, num_experts: Mapping[int, int], num_ranks: int | None = None) -> dict[int, ExpertPlacement]:
    """Return the placement of each layer of a model.

    num_experts  of each layer that has experts, by its index
    num_ranks    None: any number

    Raises ConfigError if the file is not a placement, or not one of these layers on so many ranks.
    """
    found: dict[int, ExpertPlacement] = {}
    for layer, ranks in _read(path, _PLACEMENT, num_experts).items():
        where = f"expert placement {path}: layer {layer}"
        is_list = isinstance(ranks, list) and all(_is_ints(experts) for experts in ranks)
        if not is_list:
            raise ConfigError(f"{where} must be a list with the list of experts of each rank, got {str(ranks)[:80]}")
        if num_ranks is not None and len(ranks) != num_ranks:
            raise ConfigError(f"{where} is for {len(ranks)} ranks, but tensor_parallel_size is {num_ranks}")
        try:
            found[layer] = ExpertPlacement(num_experts[layer], tuple(map(tuple, ranks)))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return found


def write_loads(
    path: str, tokens: Mapping[int, Sequence[int]], pairs: Mapping[int, Sequence[Sequence[int]]] | None = None
) -> None:
    """Write the tokens of each expert of each layer, by the layer's index in the model; pairs: those that chose two experts."""
    entries = {layer: list(counts) for layer, counts in tokens.items()}
    _write(path, _LOAD, entries, {layer: [list(row) for row in rows] for layer, rows in (pairs or {}).items()})


def read_pairs(path: str, tokens: Mapping[int, Sequence[int]]) -> dict[int, NDArray[np.int64]]:
    """Return the tokens that chose two experts [E, E] of each layer; tokens: what read_loads returned. Raises ConfigError if
    the file has none, which only GPU ranks on several hosts count."""
    entries = _read_file(path, _LOAD).get("pairs")
    if not isinstance(entries, dict) or set(entries) != set(map(str, tokens)):
        raise ConfigError(f"expert load {path} has no pairs of experts of its layers: GPU ranks on several hosts count them")
    found: dict[int, NDArray[np.int64]] = {}
    for layer, counts in tokens.items():
        rows = entries[str(layer)]
        is_square = isinstance(rows, list) and len(rows) == len(counts)
        if is_square and all(_is_ints(row) and len(row) == len(counts) and min(row) >= 0 for row in rows):
            found[layer] = np.array(rows, np.int64)
        if layer not in found or (found[layer] != found[layer].T).any():
            size = len(counts)
            raise ConfigError(
                f"expert load {path}: pairs of layer {layer} must be a symmetric matrix [{size}, {size}] of integers >= 0"
            )
    return found


def read_loads(path: str, num_experts: Mapping[int, int] | None = None) -> dict[int, list[int]]:
    """Return the tokens of each expert of each layer of a model.

    num_experts  of each layer that has experts, by its index; None: those of the file

    Raises ConfigError if the file is not a load, or not one of these layers.
    """
    found: dict[int, list[int]] = {}
    for layer, counts in _read(path, _LOAD, num_experts).items():
        where = f"expert load {path}: layer {layer}"
        if not _is_ints(counts) or min(counts, default=0) < 0:
            raise ConfigError(f"{where} must be a list of integers >= 0, the tokens of each expert, got {str(counts)[:80]}")
        if num_experts is not None and len(counts) != num_experts[layer]:
            raise ConfigError(f"{where} has {len(counts)} experts, but the model has {num_experts[layer]} there")
        found[layer] = counts
    return found


def _is_ints(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _write(path: str, kind: str, layers: Mapping[int, list[Any]], pairs: Mapping[int, list[Any]] | None = None) -> None:
    """Write a file, whole or not at all: readers never see a part."""
    lines, more = (
        ",\n".join(f'  "{layer}": {json.dumps(value)}' for layer, value in sorted(each.items()))
        for each in (layers, pairs or {})
    )
    more = f', "pairs": {{\n{more}\n}}' if more else ""
    target = Path(path).expanduser()
    written = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        written.write_text(f'{{"kind": "{kind}", "version": 1, "layers": {{\n{lines}\n}}{more}}}\n', encoding="utf-8")
        written.replace(target)
    except OSError as error:
        raise ConfigError(f"the {kind} cannot be written to {path}: {error.strerror}") from error


def _read(path: str, kind: str, num_experts: Mapping[int, int] | None) -> dict[int, Any]:
    """Return the entry of each layer. Raises ConfigError where the file has other layers than the model's with experts."""
    layers: dict[str, Any] = _read_file(path, kind)["layers"]
    if num_experts is None:
        odd = next((layer for layer in layers if not (layer.isascii() and layer.isdigit() and len(layer) < 7)), None)
        if odd is not None or not layers:
            raise ConfigError(f"{kind} {path} must have layers by their index, from 0, got {odd!r}")
        return {int(layer): value for layer, value in layers.items()}
    wanted = {str(layer) for layer in num_experts}
    if set(layers) != wanted:
        odd = sorted(set(layers) ^ wanted)[0]
        raise ConfigError(
            f"{kind} {path} {'lacks layer' if odd in wanted else 'has layer'} {odd}; the model has experts in "
            f"{len(wanted)} layers: {', '.join(map(str, sorted(num_experts)))}"
        )
    return {int(layer): value for layer, value in layers.items()}


def _read_file(path: str, kind: str) -> dict[str, Any]:
    """Return what a file of a kind has, "layers" among it. Raises ConfigError."""
    try:
        file = Path(path).expanduser()
        if file.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{kind} {path} has {file.stat().st_size} bytes; allowed: {_MAX_BYTES}")
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{kind} {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{kind} {path} is not JSON: {error}") from error
    is_known = isinstance(content, dict) and content.get("kind") == kind and content.get("version") == 1
    if not is_known or not isinstance(content.get("layers"), dict):
        raise ConfigError(f'{path} is not a file with "kind": "{kind}", "version": 1 and "layers"')
    return content
