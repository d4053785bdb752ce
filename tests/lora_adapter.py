"""Write random LoRA adapters in the layout of PEFT, without peft."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.contracts.model_spec import MoeSpec
from quire.model.config_reader import read_model_spec
from quire.model.lora.adapter import Adapter, LowRankPair, adaptable_shapes
from quire.model.parameters import parameter_shapes

PREFIX = "base_model.model."


def load_random_adapter(decoder: Any, key: str, names: str = ".*", rank: int = 5) -> None:
    """Load an adapter of the linear layers, with experts, whose canonical names match a regular expression."""
    generator, pairs = torch.Generator().manual_seed(len(names)), {}
    shapes = parameter_shapes(decoder.spec)
    linear = adaptable_shapes(shapes)
    for index, layer in enumerate(decoder.spec.layers):
        if isinstance(layer.mlp, MoeSpec) and layer.mlp.expert.is_gated:
            num_experts, rows, columns = shapes[f"layers.{index}.experts.down.weight"]
            sizes = {"gate": (columns, rows), "up": (columns, rows), "down": (rows, columns)}
            for expert in range(num_experts):
                linear |= {f"layers.{index}.experts.{expert}.{module}": size for module, size in sizes.items()}
    for name, (rows, columns) in linear.items():
        if re.fullmatch(names, name):
            matrices = torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator)
            pairs[name] = LowRankPair(*((0.2 * matrix).to(decoder.dtype) for matrix in matrices))
    decoder.adapters.load(Adapter(key, rank, pairs))


def write_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, int]], rank: int = 4, seed: int = 0, **changes: object
) -> dict[str, Tensor]:
    """Write an adapter of some modules, and return module -> what merging it adds to the weight [out, in], in f32.

    shapes   module -> [out, in]
    changes  of adapter_config.json; rank_pattern and alpha_pattern by the full names of modules
    """
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "some/base",
        "r": rank,
        "lora_alpha": 2 * rank,
        "use_rslora": False,
        "bias": "none",
        "modules_to_save": None,
        "target_modules": sorted({module.rpartition(".")[2] for module in shapes}),
        "rank_pattern": {},
        "alpha_pattern": {},
        **changes,
    }
    generator = torch.Generator().manual_seed(seed)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    merged: dict[str, Tensor] = {}
    for module, (rows, columns) in shapes.items():
        own_rank = config["rank_pattern"].get(module, rank)
        alpha = config["alpha_pattern"].get(module, config["lora_alpha"])
        a = torch.randn(own_rank, columns, generator=generator) * 0.2
        b = torch.randn(rows, own_rank, generator=generator) * 0.2
        pairs[module] = (a, b)
        scale = alpha / math.sqrt(own_rank) if config["use_rslora"] else alpha / own_rank
        merged[module] = b @ a * scale
    _write(folder, config, pairs)
    return merged


def write_stacks(folder: Path, base: Path, rank: int = 3) -> dict[str, Tensor]:
    """Write an adapter of all stacks of experts as PEFT writes `target_parameters`; return name of a stack -> its delta."""
    hidden = read_model_spec(base).hidden_size
    generator = torch.Generator().manual_seed(5)
    pairs, deltas = {}, {}
    for name, tensor in load_file(base / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if tensor.dim() != 3 or kind not in ("gate_up_proj", "down_proj"):
            continue
        outputs, inputs = tensor.shape[1:] if kind == "gate_up_proj" else tensor.shape[:0:-1]
        is_transposed = outputs == hidden != inputs
        rows, columns = tensor.shape[:0:-1] if is_transposed else tensor.shape[1:]
        a = 0.2 * torch.randn(len(tensor) * rank, columns, generator=generator)
        b = 0.2 * torch.randn(rows, rank * len(tensor), generator=generator)
        split = a.view(len(tensor), rank, columns), b.view(rows, rank, len(tensor))
        delta = 2 * torch.einsum("eri,ore->eoi", *split)
        deltas[name] = delta.transpose(1, 2) if is_transposed else delta
        pairs[f"{module}.base_layer" if kind == "gate_up_proj" else module] = (a, b)
    write_pairs(folder, pairs, alpha=2 * rank, rank=rank)
    return deltas


def write_merged(base: Path, folder: Path, deltas: Mapping[str, Tensor]) -> Path:
    """Write a copy of a checkpoint of one file with module -> delta [out, in] added to its weights; return its folder."""
    shutil.copytree(base, folder)
    tensors = load_file(base / "model.safetensors")
    changed = {f"{module}.weight": tensors[f"{module}.weight"] + delta for module, delta in deltas.items()}
    save_file(tensors | changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_pairs(folder: Path, pairs: Mapping[str, tuple[Tensor, Tensor]], alpha: float, rank: int | None = None) -> None:
    """Write an adapter with given matrices: module -> lora_A [rank, in] and lora_B [out, rank], all of one rank."""
    rank = rank or len(next(iter(pairs.values()))[0])
    names = sorted({module.rpartition(".")[2] for module in pairs})
    _write(folder, {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": names}, pairs)


def _write(folder: Path, config: Mapping[str, object], pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    tensors: dict[str, Tensor] = {}
    for module, (a, b) in pairs.items():
        tensors[f"{PREFIX}{module}.lora_A.weight"], tensors[f"{PREFIX}{module}.lora_B.weight"] = a.clone(), b
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "adapter_model.safetensors"))
