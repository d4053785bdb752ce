"""Convert a checkpoint of transformers into a GGUF file in float32, as the converters of the format do.

Written from the facts of the format (names, row order of q and k, norms + 1), independently of what quire reads them with.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.gguf_writer import Q8_0, write_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ARCHITECTURES = {
    **{"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss"},
    **{name: name for name in ("llama", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "gpt2", "olmo2", "granite")},
}
_PERMUTED = ("llama", "mistral", "mixtral", "granite")
_SANDWICH = ("gemma2", "gemma3_text", "olmo2", "gpt_oss")
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_TOP = {
    **{"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"},
    **{"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"},
}
_KEYS = {
    **{"num_hidden_layers": "block_count", "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length"},
    **{"max_position_embeddings": "context_length", "num_attention_heads": "attention.head_count"},
    **{"num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length", "vocab_size": "vocab_size"},
    **{
        "n_layer": "block_count",
        "n_embd": "embedding_length",
        "n_positions": "context_length",
        "n_head": "attention.head_count",
    },
    **{"sliding_window": "attention.sliding_window", "num_local_experts": "expert_count", "num_experts": "expert_count"},
    **{"num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length"},
}
_NUMBERS = {
    **{"rms_norm_eps": "attention.layer_norm_rms_epsilon", "layer_norm_epsilon": "attention.layer_norm_epsilon"},
    **{"rope_theta": "rope.freq_base", "attn_logit_softcapping": "attn_logit_softcapping"},
    **{"final_logit_softcapping": "final_logit_softcapping", "attention_multiplier": "attention.scale"},
    **{"embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"},
}


def convert(folder: Path, model: PreTrainedModel, path: Path) -> Path:
    """Write the GGUF file of a checkpoint whose config.json is in the style of transformers 4; returns `path`."""
    return write_gguf(path, *parts_of(folder, model))


def parts_of(folder: Path, model: PreTrainedModel):
    """Return the metadata and the tensors of the GGUF file of a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    metadata = metadata_of(config)
    tensors = _rope_tensors(config)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        tensors |= convert_tensor(name, parameter.float().numpy(), config)
    return metadata, tensors


def quantize_q8_0(values: np.ndarray) -> tuple[tuple[int, tuple[int, ...], bytes], np.ndarray]:
    """Return a tensor as blocks of Q8_0, ready to write, and the values that they stand for."""
    blocks = values.reshape(-1, 32)
    scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    codes = np.rint(blocks / np.maximum(scale.astype(np.float32), 1e-8)).clip(-127, 127).astype(np.int8)
    content = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], 1).tobytes()
    return (Q8_0, values.shape, content), (scale.astype(np.float32) * codes).reshape(values.shape)


def metadata_of(config):
    """Return the metadata of a config.json in the style of transformers 4."""
    arch = ARCHITECTURES[config["model_type"]]
    metadata = {"general.architecture": ("string", arch)}
    metadata |= {f"{arch}.{key}": ("u32", config[name]) for name, key in _KEYS.items() if config.get(name) is not None}
    metadata |= {f"{arch}.{key}": ("f32", config[name]) for name, key in _NUMBERS.items() if config.get(name) is not None}
    if arch == "gpt2":
        metadata["gpt2.feed_forward_length"] = ("u32", config["n_inner"] or 4 * config["n_embd"])
    elif config.get("head_dim") is not None:
        metadata[f"{arch}.attention.value_length"] = ("u32", config["head_dim"])
    if arch == "qwen2" or (arch.startswith("qwen3") and not config.get("use_sliding_window")):
        metadata.pop(f"{arch}.attention.sliding_window", None)
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        metadata |= {
            f"{arch}.rope.scaling.type": ("string", kind),
            f"{arch}.rope.scaling.factor": ("f32", scaling["factor"]),
        }
    if kind == "yarn":
        length = scaling["original_max_position_embeddings"]
        metadata[f"{arch}.rope.scaling.original_context_length"] = ("u32", length)
    if arch == "gpt-oss":
        metadata["gpt-oss.expert_feed_forward_length"] = ("u32", config["intermediate_size"])
    if arch == "phi3":
        original = config.get("original_max_position_embeddings") or config["max_position_embeddings"]
        size = config["hidden_size"] // config["num_attention_heads"]
        metadata["phi3.rope.scaling.original_context_length"] = ("u32", original)
        metadata["phi3.rope.dimension_count"] = ("u32", int(size * config.get("partial_rotary_factor", 1)))
        if kind == "longrope":
            ratio = config["max_position_embeddings"] / original
            factor = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
            metadata["phi3.rope.scaling.attn_factor"] = ("f32", factor)
    return metadata


def _rope_tensors(config):
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "longrope":
        return {f"rope_factors_{w}.weight": np.array(scaling[f"{w}_factor"], np.float32) for w in ("long", "short")}
    if kind != "llama3":
        return {}
    dim = config["head_dim"]
    wavelengths = 2 * math.pi * config["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    original, low, high = (
        scaling[f"{key}"] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for wavelength in wavelengths:
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(scaling["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return {"rope_freqs.weight": np.array(factors, np.float32)}


def convert_tensor(name, values, config):
    """Return name in the file -> array, of one parameter [out, in] as a state_dict has it."""
    model_type = config["model_type"]
    name = re.sub(r"^(model|transformer)\.", "", name)
    layer = re.fullmatch(r"(?:layers|h)\.(\d+)\.(.+)", name)
    if layer is None:
        module, _, kind = name.rpartition(".")
        name = f"{_TOP[module]}.{kind}"
        module = ""
    else:
        index, rest = layer.groups()
        if rest == "self_attn.sinks":
            return {f"blk.{index}.attn_sinks.weight": values}
        if ".experts." in rest:
            return _experts(index, rest, values, takes_turns=model_type == "gpt_oss")
        module, _, kind = rest.rpartition(".")
        if module == "post_attention_layernorm":
            short = "post_attention_norm" if model_type in _SANDWICH else "ffn_norm"
        else:
            short = _NAMES[module]
        name = f"blk.{index}.{short}.{kind}"
    if model_type in _PERMUTED and module in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config["num_attention_heads" if module == "self_attn.q_proj" else "num_key_value_heads"]
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    if model_type.startswith("gemma") and name.endswith("norm.weight"):
        values = values + 1
    if model_type == "gpt2" and values.ndim == 2 and module:
        values = values.T
    return {name: np.ascontiguousarray(values)}


def _experts(index, rest, values, takes_turns):
    """takes_turns: the rows of gate and up do (gpt-oss), and matrices are [in, out]."""
    kind = "bias" if rest.endswith("_bias") else "weight"
    if takes_turns and kind == "weight":
        values = values.swapaxes(1, 2)
    if "gate_up" not in rest:
        return {f"blk.{index}.ffn_down_exps.{kind}": np.ascontiguousarray(values)}
    half = values.shape[1] // 2
    gate, up = (values[:, ::2], values[:, 1::2]) if takes_turns else (values[:, :half], values[:, half:])
    return {f"blk.{index}.ffn_{which}_exps.{kind}": np.ascontiguousarray(p) for which, p in (("gate", gate), ("up", up))}
