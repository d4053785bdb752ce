"""Open the tensors of a checkpoint folder, memory-mapped: safetensors or pytorch_model.bin, in one file or in shards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from quire.base.errors import ModelFormatError
from quire.base.gguf_file import is_gguf
from quire.model.config_reader import read_json_object
from quire.model.gguf_tensors import open_gguf_tensors
from quire.model.mapped_files import MappedFiles
from quire.model.safetensors_header import check_safetensors
from quire.quant.weight import StoredWeight

_SAFETENSORS, _PICKLED = "model.safetensors", "pytorch_model.bin"
_PROGRESS_DELAY_S = 3.0


def open_tensors(folder: Path, files: MappedFiles | None = None) -> Mapping[str, Tensor | StoredWeight]:
    """Return stored name -> tensor, or weight in a GGUF file. Data is read at its first use. Raises ModelFormatError.

    files  receives the files that were mapped
    """
    if is_gguf(folder):
        return open_gguf_tensors(folder, files)
    for name in (_SAFETENSORS, _PICKLED):
        if (folder / name).is_file():
            return open_file(folder / name, files)
        if (folder / f"{name}.index.json").is_file():
            return _open_shards(folder, folder / f"{name}.index.json", files)
    present = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".gguf", ".pt", ".pth"))
    raise ModelFormatError(
        f"{folder} has no weights that quire can read: {_SAFETENSORS}, {_PICKLED} or the .index.json of either"
        + (f"; it has {', '.join(present[:8])}" if present else "")
    )


def has_weights(path: Path) -> bool:
    """Return whether a folder has weights of any kind, or an index of weights; True for a GGUF file."""
    suffixes, indices = (".safetensors", ".bin", ".gguf"), (f"{_SAFETENSORS}.index.json", f"{_PICKLED}.index.json")
    return path.is_file() or any(file.suffix in suffixes or file.name in indices for file in path.iterdir())


def stored_bytes(path: Path) -> int:
    """Return the size of the weight files of a checkpoint folder, or of a GGUF file with all its parts."""
    if path.is_file():
        stem = path.name.split("-of-")[0].rstrip("0123456789")
        files = path.parent.glob(f"{stem}*.gguf") if "-of-" in path.name else iter((path,))
    else:
        files = (file for file in path.iterdir() if file.suffix in (".safetensors", ".bin", ".gguf"))
    return sum(file.stat().st_size for file in files)


def _open_shards(folder: Path, index: Path, files: MappedFiles | None) -> dict[str, Tensor]:
    shard_of = read_json_object(index).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(shard, str) for shard in shard_of.values()):
        raise ModelFormatError(f"{index} must have a weight_map from names of tensors to names of files; get the file again")
    shards = sorted(set(shard_of.values()))
    for shard in shards:
        if "/" in shard or "\\" in shard or "\0" in shard or shard in ("", ".", ".."):
            raise ModelFormatError(
                f"{index} names {shard!r}, which is no plain file name and may be outside the folder; "
                "do not trust this checkpoint"
            )
    absent = [shard for shard in shards if not os.path.isfile(folder / shard)]
    if absent:
        raise ModelFormatError(f"{index} names files that are not in {folder}: {', '.join(absent)}; download them")
    for shard in shards:
        _refuse_links_out(folder, folder / shard)
    tensors: dict[str, Tensor] = {}
    for shard in tqdm(shards, "opening shards", delay=_PROGRESS_DELAY_S, disable=None):
        opened = open_file(folder / shard, files)
        strays = [name for name, home in shard_of.items() if home == shard and name not in opened]
        if strays:
            raise ModelFormatError(f"{folder / shard} lacks tensors that {index.name} says are in it: {listing(strays)}")
        tensors |= {name: tensor for name, tensor in opened.items() if shard_of.get(name, shard) == shard}
    return tensors


def _refuse_links_out(folder: Path, file: Path) -> None:
    """Refuse a shard that is a link out of the folder, except in the hub's cache, where snapshots link to `blobs`."""
    home, target = folder.resolve(), file.resolve()
    is_blob = target.parent.name == "blobs" and home.is_relative_to(target.parent.parent)
    if not target.is_relative_to(home) and not is_blob:
        raise ModelFormatError(
            f"{file} is a link to {target}, outside the folder; do not trust this checkpoint, or copy the file into the folder"
        )


def open_file(file: Path, files: MappedFiles | None = None) -> dict[str, Tensor]:
    """Return stored name -> tensor of one safetensors or torch file. Raises ModelFormatError."""
    num_bytes = file.stat().st_size
    opened = _open_safetensors(file) if file.suffix == ".safetensors" else _open_pickled(file)
    if files is not None:
        files.add(file, num_bytes, opened.values())
    return opened


def _open_safetensors(file: Path) -> dict[str, Tensor]:
    check_safetensors(file)
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: _aligned(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ModelFormatError(f"{file} is damaged or not a safetensors file ({error}); download it again") from error


def _aligned(tensor: Tensor) -> Tensor:
    """Return a tensor with aligned data: kernels expect addresses that are multiples of the item size."""
    return tensor if tensor.data_ptr() % tensor.element_size() == 0 else tensor.clone()


def _open_pickled(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a torch file; no code in it is executed (weights_only)."""
    advice = "quire reads plain dictionaries of tensors; get a safetensors version of the checkpoint or download it again"
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelFormatError(f"{file} cannot be read as weights ({reason[0][:200]}); {advice}") from error
    if not isinstance(loaded, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in loaded.items()):
        raise ModelFormatError(f"{file} holds something other than weights; {advice}")
    odd = [name for name, tensor in loaded.items() if not _is_in_memory(tensor)]
    if odd:
        raise ModelFormatError(f"{file} holds tensors whose numbers do not lie in memory ({listing(odd)}); {advice}")
    return dict(loaded)


def _is_in_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's memory holds its plain values, which kernels read by address."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu" and not tensor.is_nested
    return is_plain and tensor.layout == torch.strided and not tensor.is_neg() and not tensor.is_conj()


def listing(items: list[str], limit: int = 8) -> str:
    """Return items joined for an error message, at most `limit`."""
    rest = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + rest
