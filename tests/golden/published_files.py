"""Rewrite checkpoints of transformers as their models' authors publish them, where these have names of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_WINDOW, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_BLOCKS = "minimax_m3_sparse"
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


MIMO_V2_FLASH: dict[str, object] = {
    **{"num_hidden_layers": 6, "num_key_value_heads": 1, "head_dim": 20, "v_head_dim": 12, "sliding_window": 11},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2},
    **{"routed_scaling_factor": 1.7, "attention_bias": True, "attention_value_scale": 0.6},
}


MINIMAX_M3: dict[str, object] = {
    **{"intermediate_size": 24, "dense_intermediate_size": 80, "shared_intermediate_size": 40, "num_hidden_layers": 3},
    **{"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "swiglu_limit": 1.5},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    **{"layer_types": ["full_attention", _BLOCKS, _BLOCKS], "mlp_layer_types": ["dense", "sparse", "sparse"]},
    **{"index_n_heads": 2, "index_head_dim": 12, "index_block_size": 5, "index_topk_blocks": 3},
}


def publish(folder: Path, text: dict[str, Any]) -> None:
    """Rewrite the tensors of a folder and, in its place, the config of its language model, if it is of one of these types."""
    if text["model_type"] == "deepseek_v4":
        _publish_deepseek_v4(folder, text)
    if text["model_type"] == "minimax_m3_vl_text":
        _publish_minimax_m3(text)
    if text["model_type"] == "minimax":
        _publish_minimax(text)
    if text["model_type"] == "mimo_v2_flash":
        _publish_mimo_v2_flash(text)


def _publish_mimo_v2_flash(text: dict[str, Any]) -> None:
    text["hybrid_layer_pattern"] = [int(kind == "sliding_attention") for kind in text.pop("layer_types")]
    text["moe_layer_freq"] = [int(kind == "sparse") for kind in text.pop("mlp_layer_types")]
    full, near = (text["rope_parameters"][kind] for kind in ("full_attention", "sliding_attention"))
    text |= {"rope_theta": full["rope_theta"], "swa_rope_theta": near["rope_theta"], "partial_rotary_factor": 0.334}
    text |= {"sliding_window_size": text.pop("sliding_window") - 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    del text["rope_parameters"]


def _publish_minimax_m3(text: dict[str, Any]) -> None:
    """Rewrite the config of the language model in its place."""
    names = {"index_n_heads": "sparse_num_index_heads", "index_head_dim": "sparse_index_dim"}
    names |= {"index_block_size": "sparse_block_size", "index_topk_blocks": "sparse_topk_blocks"}
    sparse = {new: text.pop(old) for old, new in names.items()} | {"sparse_local_block": text.pop("index_local_blocks")}
    sparse["sparse_attention_freq"] = [int(kind == _BLOCKS) for kind in text.pop("layer_types")]
    text["moe_layer_freq"] = [int(kind == "sparse") for kind in text.pop("mlp_layer_types")]
    text["sparse_attention_config"] = {**sparse, "sparse_score_type": "max", "sparse_init_block": 0}
    text |= {"hidden_act": "swigluoai", "use_qk_norm": True, "qk_norm_type": "per_head", "use_gemma_norm": True}


def _publish_deepseek_v4(folder: Path, config: dict[str, Any]) -> None:
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


def _publish_minimax(config: dict[str, Any]) -> None:
    """Give a config.json of MiniMax the keys of the files of the model's authors."""
    config |= {"model_type": "minimax_m1", "architectures": ["MiniMaxM1ForCausalLM"], "postnorm": True, "rotary_dim": 16}
    config["attn_type_list"] = [int(name == "full_attention") for name in config["layer_types"]]
    for name in [name for name in config if name.endswith("_factor")]:
        config[f"layernorm_{name.removesuffix('_factor').replace('_attn', '_attention')}"] = config.pop(name)
