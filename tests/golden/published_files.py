"""Rewrite checkpoints of transformers as their models' authors publish them, where these have names of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_WINDOW, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATIOS = {_WINDOW: 0, _SPARSE: 4, _HEAVY: 128}


DEEPSEEK_V4: dict[str, object] = {
    **{"num_key_value_heads": 1, "head_dim": 16, "partial_rotary_factor": 0.5, "q_lora_rank": 20, "o_groups": 2},
    **{"o_lora_rank": 12, "sliding_window": 11, "num_hidden_layers": 4},
    "layer_types": [_WINDOW, _SPARSE, _HEAVY, _SPARSE],
    "compress_rates": {_SPARSE: 4, _HEAVY: 12},
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
    **{"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "intermediate_size": 24},
    "swiglu_limit": 1.5,
}


def publish_deepseek_v4(folder: Path, config: dict[str, Any]) -> None:
    """Rewrite the tensors of a folder and, in its place, its config."""
    file = folder / "model.safetensors"
    save_file({_published_name(name): tensor for name, tensor in load_file(file).items()}, file)
    rates = config.pop("compress_rates")
    config |= {"compress_rate_csa": rates[_SPARSE], "compress_rate_hca": rates[_HEAVY]}
    # The ratio of the layer that only drafts comes last.
    config["compress_ratios"] = [*(_RATIOS[name] for name in config.pop("layer_types")), 0]
    config["num_hash_layers"] = config.pop("mlp_layer_types").count("hash_moe")
    config["topk_method"], config["expert_dtype"] = "noaux_tc", "fp4"
    del config["partial_rotary_factor"]
    rope = config.pop("rope_parameters")["compress"]
    names = {"rope_type": "type", "factor": "factor", "original_max_position_embeddings": "original_max_position_embeddings"}
    config["rope_scaling"] = {**{new: rope[old] for old, new in names.items()}, "beta_fast": 32, "beta_slow": 1}


def split_convolutions(folder: Path) -> None:
    """Split the convolutions of OLMo Hybrid where the published files do, and give norms their names of these."""
    file = folder / "model.safetensors"
    tensors, config = load_file(file), json.loads((folder / "config.json").read_text())
    for index, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{index}"
        if kind == "full_attention":
            tensors[f"{layer}.post_attention_layernorm.weight"] = tensors.pop(f"{layer}.feedforward_layer_norm.weight")
            continue
        names = [f"{layer}.linear_attn.{name}_{end}.weight" for end in ("conv1d", "proj") for name in "qkv"]
        sizes = [len(tensors[name]) for name in names[3:]]
        parts = torch.cat([tensors[name] for name in names[:3]]).split(sizes)
        tensors |= {name: part.clone() for name, part in zip(names[:3], parts, strict=True)}
    save_file(tensors, file)


def _published_name(name: str) -> str:
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")
