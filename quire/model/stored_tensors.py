"""Open the tensors of a checkpoint folder, memory-mapped: safetensors or pytorch_model.bin, in one file or in shards."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from quire.base.errors import ModelFormatError
from quire.model.config_reader import read_json_object

_SAFETENSORS, _PICKLED = "model.safetensors", "pytorch_model.bin"
_PROGRESS_DELAY_S = 3.0


def open_tensors(folder: Path) -> dict[str, Tensor]:
    """Return stored name -> tensor. Data is read from the file when it is first used. Raises ModelFormatError."""
    for name in (_SAFETENSORS, _PICKLED):
        if (folder / name).is_file():
            return _open_file(folder / name)
        if (folder / f"{name}.index.json").is_file():
            return _open_shards(folder, folder / f"{name}.index.json")
    present = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".gguf", ".pt", ".pth"))
    raise ModelFormatError(
        f"{folder} has no weights that quire can read: {_SAFETENSORS}, {_PICKLED} or the .index.json of either"
        + (f"; it has {', '.join(present[:8])}" if present else "")
    )


def _open_shards(folder: Path, index: Path) -> dict[str, Tensor]:
    shard_of = read_json_object(index).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(shard, str) for shard in shard_of.values()):
        raise ModelFormatError(f"{index} must have a weight_map from names of tensors to names of files; get the file again")
    shards = sorted(set(shard_of.values()))
    for shard in shards:
        path = PurePosixPath(shard)
        if path.is_absolute() or ".." in path.parts or "\\" in shard or not path.parts:
            raise ModelFormatError(f"{index} names {shard!r}, which is outside the folder; do not trust this checkpoint")
    absent = [shard for shard in shards if not os.path.isfile(folder / shard)]
    if absent:
        raise ModelFormatError(f"{index} names files that are not in {folder}: {', '.join(absent)}; download them")
    tensors: dict[str, Tensor] = {}
    for shard in tqdm(shards, "opening shards", delay=_PROGRESS_DELAY_S, disable=None):
        opened = _open_file(folder / shard)
        strays = [name for name, home in shard_of.items() if home == shard and name not in opened]
        if strays:
            raise ModelFormatError(f"{folder / shard} lacks tensors that {index.name} says are in it: {listing(strays)}")
        tensors |= {name: tensor for name, tensor in opened.items() if shard_of.get(name, shard) == shard}
    return tensors


def _open_file(file: Path) -> dict[str, Tensor]:
    return _open_safetensors(file) if file.suffix == ".safetensors" else _open_pickled(file)


def _open_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ModelFormatError(f"{file} is damaged or not a safetensors file ({error}); download it again") from error


def _open_pickled(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a torch file; nothing in it is executed (weights_only)."""
    advice = "quire reads plain dictionaries of tensors; get a safetensors version of the checkpoint or download it again"
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelFormatError(f"{file} cannot be read as weights ({reason[0][:200]}); {advice}") from error
    if not isinstance(loaded, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in loaded.items()):
        raise ModelFormatError(f"{file} holds something other than weights; {advice}")
    return dict(loaded)


def listing(items: list[str], limit: int = 8) -> str:
    """Return items joined for an error message, cut after `limit`."""
    rest = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + rest
