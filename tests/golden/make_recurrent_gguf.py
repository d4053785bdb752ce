"""Convert models with a recurrent state into GGUF files in float32, as the converters of the format do.

Written from the facts of the format, independently of what quire reads them with; see make_gguf.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.gguf_writer import write_gguf

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ARCHITECTURES = {
    **{
        "qwen3_next": "qwen3next",
        "qwen3_5_text": "qwen35",
        "qwen3_5_moe_text": "qwen35moe",
        "granitemoehybrid": "granitehybrid",
    },
    **{"lfm2": "lfm2", "lfm2_moe": "lfm2moe", "nemotron_h": "nemotron_h", "falcon_h1": "falcon-h1", "jamba": "jamba"},
    **{"mamba": "mamba", "falcon_mamba": "mamba", "mamba2": "mamba2", "kimi_linear": "kimi-linear"},
}
_EACH = ("gate", "up", "down")
_NAMES = {
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    **{f"mixer.{one}_proj": f"attn_{one}" for one in "qkv"},
    **dict.fromkeys(("self_attn.o_proj", "self_attn.out_proj", "mixer.o_proj"), "attn_output"),
    **dict.fromkeys(("self_attn.q_norm", "self_attn.q_layernorm"), "attn_q_norm"),
    **dict.fromkeys(("self_attn.k_norm", "self_attn.k_layernorm"), "attn_k_norm"),
    **dict.fromkeys(("input_layernorm", "operator_norm", "norm"), "attn_norm"),
    **dict.fromkeys(("post_attention_layernorm", "pre_ff_layernorm", "ffn_norm"), "ffn_norm"),
    **{f"{block}.{one}_proj": f"ffn_{one}" for block in ("mlp", "feed_forward", "mixer") for one in _EACH},
    **{f"feed_forward.{theirs}": f"ffn_{ours}" for theirs, ours in (("w1", "gate"), ("w3", "up"), ("w2", "down"))},
    **{f"{block}.{one}_proj": f"ffn_{one}_shexp" for block in ("mlp.shared_expert", "mixer.shared_experts") for one in _EACH},
    **{"mixer.fc1_latent_proj": "ffn_latent_down", "mixer.fc2_latent_proj": "ffn_latent_up"},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **dict.fromkeys(
        ("mlp.gate", "feed_forward.gate", "feed_forward.router", "mixer.gate", "block_sparse_moe.router"), "ffn_gate_inp"
    ),
    **{f"conv.{one}": f"shortconv.{one}" for one in ("conv", "in_proj", "out_proj")},
    **{"in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate", "in_proj_ba": "ssm_ba", "in_proj_a": "ssm_alpha"},
    **{"in_proj_b": "ssm_beta", "in_proj": "ssm_in", "x_proj": "ssm_x", "dt_proj": "ssm_dt", "out_proj": "ssm_out"},
    **{f"self_attn.forget_gate.f_{part}_proj": f"ssm_f_{part}" for part in "ab"},
    **{f"self_attn.g_{part}_proj": f"ssm_g_{part}" for part in "ab"},
    **{"self_attn.b_proj": "ssm_beta", "self_attn.o_norm": "ssm_norm", "self_attn.q_a_proj": "attn_q_a"},
    **{"self_attn.q_b_proj": "attn_q_b", "self_attn.q_a_layernorm": "attn_q_a_norm"},
    **{"self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm"},
    **{f"mlp.shared_experts.{one}_proj": f"ffn_{one}_shexp" for one in _EACH},
    **{"dt_layernorm": "ssm_dt_norm", "b_layernorm": "ssm_b_norm", "c_layernorm": "ssm_c_norm", "conv1d": "ssm_conv1d"},
}
_TOP = {
    **dict.fromkeys(("embed_tokens", "embeddings"), "token_embd"),
    **dict.fromkeys(("norm", "norm_f", "final_layernorm"), "output_norm"),
    **{"embedding_norm": "token_embd_norm", "lm_head": "output"},
}
_COUNTS = {
    **{"num_hidden_layers": "block_count", "hidden_size": "embedding_length", "max_position_embeddings": "context_length"},
    **{"intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count"},
    **{"num_key_value_heads": "attention.head_count_kv", "num_experts": "expert_count", "num_local_experts": "expert_count"},
    **{"n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    **{"moe_intermediate_size": "expert_feed_forward_length", "shared_intermediate_size": "expert_shared_feed_forward_length"},
    **dict.fromkeys(
        ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), "expert_shared_feed_forward_length"
    ),
    **{"n_group": "expert_group_count", "topk_group": "expert_group_used_count", "moe_latent_size": "moe_latent_size"},
    **{"num_dense_layers": "leading_dense_block_count", "conv_L_cache": "shortconv.l_cache"},
    **dict.fromkeys(("mamba_n_groups", "n_groups", "linear_num_key_heads"), "ssm.group_count"),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "linear_key_head_dim"), "ssm.state_size"),
    **dict.fromkeys(("mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim"), "ssm.conv_kernel"),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "time_step_rank", "mamba_dt_rank"), "ssm.time_step_rank"),
    "linear_num_value_heads": "ssm.time_step_rank",
    **{"num_shared_experts": "expert_shared_count", "num_experts_per_token": "expert_used_count"},
    **{"kv_lora_rank": "attention.kv_lora_rank", "q_lora_rank": "attention.q_lora_rank"},
    "model_max_length": "context_length",
}
_NUMBERS = {
    **dict.fromkeys(("rms_norm_eps", "norm_eps", "layer_norm_epsilon"), "attention.layer_norm_rms_epsilon"),
    **{"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale"},
    **{"residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"},
    "routed_scaling_factor": "expert_weights_scale",
}
_QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_MAMBA2 = ("granitemoehybrid", "nemotron_h", "falcon_h1", "mamba2")


def convert(model: PreTrainedModel, path: Path) -> Path:
    """Write the GGUF file of a model; returns `path`."""
    config, tensors = model.config, {}
    for name, parameter in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            found = _convert(re.sub(r"^(model|backbone)\.", "", name), parameter.float().numpy(), config)
            tensors |= {key: np.ascontiguousarray(values) for key, values in found.items()}
    arch = ARCHITECTURES[config.model_type]
    arch += "_moe" if arch == "nemotron_h" and "moe" in config.layers_block_type else ""
    metadata = {f"{arch}.{key}": value for key, value in _metadata(config).items()}
    return write_gguf(path, {"general.architecture": ("string", arch), **metadata}, tensors)


def _metadata(config: PretrainedConfig):
    kind, values = config.model_type, config.to_dict()
    found = {key: ("u32", values[name]) for name, key in _COUNTS.items() if isinstance(values.get(name), int)}
    if kind.startswith("lfm2") or (kind == "nemotron_h" and "moe" not in config.layers_block_type):
        found = {key: value for key, value in found.items() if not key.startswith("expert_shared")}
    if kind == "nemotron_h" and "moe" not in config.layers_block_type:
        found = {key: value for key, value in found.items() if not key.startswith(("expert_", "moe_"))}
    found |= {key: ("f32", values[name]) for name, key in _NUMBERS.items() if values.get(name) is not None}
    kinds = values.get("layers_block_type") or values.get("layer_types") or []
    if kind == "jamba":
        kinds = [
            "full_attention" if index % config.attn_layer_period == config.attn_layer_offset else "mamba"
            for index in range(config.num_hidden_layers)
        ]
    if kinds and kind not in (*_QWEN, "falcon_h1"):
        counts = [config.num_key_value_heads if one == "full_attention" else 0 for one in kinds]
        found["attention.head_count_kv"] = ("i32[]", counts)
    if kind not in ("mamba", "falcon_mamba", "mamba2"):
        head_dim = values.get("head_dim") or config.hidden_size // config.num_attention_heads
        found |= {"attention.key_length": ("u32", head_dim), "attention.value_length": ("u32", head_dim)}
        ropes = values.get("rope_parameters") or {}
        found["rope.freq_base"] = ("f32", ropes.get("rope_theta", 10000.0))
        found["rope.dimension_count"] = ("u32", int(head_dim * ropes.get("partial_rotary_factor", 1)))
        if kind == "nemotron_h":  # which has no rope
            found["rope.dimension_count"] = ("u32", config.hidden_size // config.num_attention_heads)
    return found | _own(kind, config, kinds)


def _own(kind: str, config: PretrainedConfig, kinds: list[str]):
    """Return what files of one architecture say in their own way."""
    if kind in _QWEN:
        inner = config.linear_num_value_heads * config.linear_value_head_dim
        return {"ssm.inner_size": ("u32", inner), "full_attention_interval": ("u32", 4)}
    if kind == "granitemoehybrid":
        inner = int(config.mamba_expand * config.hidden_size)
        return {"ssm.inner_size": ("u32", inner), "rope.scaling.finetuned": ("bool", False)}
    if kind == "nemotron_h":
        mixture = "moe" in kinds
        size = config.moe_intermediate_size if mixture else config.intermediate_size
        sizes = [size if one in ("moe", "mlp") else 0 for one in kinds]
        inner = config.mamba_num_heads * config.mamba_head_dim
        own = {"ssm.inner_size": ("u32", inner), "feed_forward_length": ("i32[]", sizes), "block_count": ("u32", len(kinds))}
        if mixture:
            return {**own, "expert_shared_count": ("u32", 1), "expert_weights_norm": ("bool", config.norm_topk_prob)}
        return own
    if kind == "falcon_h1":
        inner = config.mamba_d_ssm or int(config.mamba_expand * config.hidden_size)
        return {"ssm.inner_size": ("u32", inner), "embedding_scale": ("f32", 1.0)}
    if kind == "jamba":
        return {"ssm.inner_size": ("u32", int(config.mamba_expand * config.hidden_size))}
    if kind == "mamba2":
        heads = {"ssm.time_step_rank": ("u32", config.num_heads), "context_length": ("u32", 1 << 20)}
        return {**heads, "ssm.inner_size": ("u32", config.num_heads * config.head_dim)}
    if kind in ("mamba", "falcon_mamba"):
        none = {"feed_forward_length": ("u32", 0), "attention.head_count": ("u32", 0), "context_length": ("u32", 1 << 20)}
        return {**none, "ssm.inner_size": ("u32", config.intermediate_size), "ssm.dt_b_c_rms": ("bool", kind != "mamba")}
    if kind == "lfm2_moe":
        return {"expert_gating_func": ("u32", 2), "expert_weights_scale": ("f32", 1.0)}
    return _kimi(config) if kind == "kimi_linear" else {"feed_forward_length": ("u32", _lfm2_inner(config))}


def _kimi(config: PretrainedConfig):
    counts = [int(one == "full_attention") for one in config.layer_types]
    return {
        **{"attention.head_count_kv": ("i32[]", counts), "kda.head_dim": ("u32", config.linear_head_dim)},
        "rope.dimension_count": ("u32", config.qk_rope_head_dim),
        "attention.key_length": ("u32", config.kv_lora_rank + config.qk_rope_head_dim),
        "attention.key_length_mla": ("u32", config.qk_nope_head_dim + config.qk_rope_head_dim),
        "attention.value_length_mla": ("u32", config.v_head_dim),
        "leading_dense_block_count": ("u32", config.mlp_layer_types.count("dense")),
        "expert_gating_func": ("u32", 2),
    }


def _convert_delta(name: str, values: np.ndarray, config: PretrainedConfig):
    """Return the tensors of a parameter of Kimi Linear's attention or delta net; None: it is that of another block."""
    name = name.replace("forget_gate.", "")
    if name == "self_attn.conv1d.weight":
        parts = np.split(values, 3)
        return {
            f"ssm_conv1d_{one}.weight": part.reshape(1, -1, 1, part.shape[-1]) for one, part in zip("qkv", parts, strict=True)
        }
    if name == "self_attn.A_log":
        return {"ssm_a": -np.exp(values)}
    if name == "self_attn.dt_bias":
        return {"ssm_dt.bias": values}
    if name != "self_attn.kv_b_proj.weight":
        return None
    keys, both = config.qk_nope_head_dim, values.reshape(config.num_attention_heads, -1, values.shape[1])
    return {"attn_k_b.weight": both[:, :keys].swapaxes(1, 2), "attn_v_b.weight": both[:, keys:]}


def _lfm2_inner(config: PretrainedConfig) -> int:
    size = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        size = int(config.block_ffn_dim_multiplier * int(2 * size / 3))
        size = config.block_multiple_of * -(-size // config.block_multiple_of)
    return size


def _convert(name: str, values: np.ndarray, config: PretrainedConfig):
    """Return name in the file -> array, of one parameter as a state_dict has it."""
    kind = config.model_type
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if kind in _QWEN and name.endswith("norm.weight") and "linear_attn" not in name:
        values = values + 1
    if layer is None:
        module, _, suffix = name.rpartition(".")
        factors = {"embed_tokens": "embedding_multiplier", "lm_head": "lm_head_multiplier"}
        values = values * getattr(config, factors[module]) if kind == "falcon_h1" and module in factors else values
        return {f"{_TOP[module]}.{suffix}": values}
    prefix, rest = f"blk.{layer[1]}", layer[2]
    if rest.endswith(("e_score_correction_bias", "expert_bias")):
        return {f"{prefix}.exp_probs_b.bias": values.reshape(-1)}
    if (found := _convert_delta(rest, values, config)) is not None:
        return {f"{prefix}.{ours}": part for ours, part in found.items()}
    if (found := _experts(rest, values, config)) is not None:
        return {f"{prefix}.ffn_{which}.weight": part for which, part in found.items()}
    mixer = re.fullmatch(r"(?:mamba|linear_attn|mixer)\.(.+)", rest)
    if mixer is not None and (found := _mixer(mixer[1], values, config)) is not None:
        return {f"{prefix}.{ours}": part for ours, part in found.items()}
    module, _, suffix = rest.rpartition(".")
    if kind == "falcon_h1":
        values = values * _falcon_factor(rest, config)
    if module == "conv.conv" and suffix == "weight":
        values = values[:, 0]
    if module == "mlp.shared_expert_gate":
        values = values[0]
    short = _NAMES[module]
    short = "post_attention_norm" if kind in _QWEN and short == "ffn_norm" else short
    if kind == "falcon_h1" and short == "ffn_norm":
        return {f"{prefix}.ffn_norm": values}
    if kind == "granitemoehybrid" and short in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if short == "attn_q" else config.num_key_value_heads
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    return {f"{prefix}.{short}.{suffix}": values}


def _experts(rest: str, values: np.ndarray, config: PretrainedConfig):
    """Return the stacks of experts, or the shared block of Granite; None: the parameter is neither."""
    kind = "_shexp" if getattr(config, "num_local_experts", 0) else ""
    if rest == "shared_mlp.input_linear.weight":
        gate, up = np.split(values, 2)
        return {f"gate{kind}": gate, f"up{kind}": up}
    if rest == "shared_mlp.output_linear.weight":
        return {f"down{kind}": values}
    if rest.endswith("experts.gate_up_proj"):
        half = values.shape[1] // 2
        return {"gate_exps": values[:, :half], "up_exps": values[:, half:]}
    if rest.endswith(("experts.down_proj", "experts.up_proj")):
        return {f"{rest.rpartition('.')[2].removesuffix('_proj')}_exps": values}
    return None


def _mixer(name: str, values: np.ndarray, config: PretrainedConfig):
    """Return the tensors of a parameter of a mixer; None: it is that of another block."""
    kind = config.model_type
    is_delta = kind in _QWEN
    if kind in ("qwen3_5_text", "qwen3_5_moe_text"):
        values = _tile(name, values, config)
    if name == "A_log":
        values = -np.exp(values)
        return {"ssm_a": values[:, None] if kind in _MAMBA2 else values}
    if name == "D":
        return {"ssm_d": values[:, None] if kind in _MAMBA2 else values}
    if name == "dt_bias":
        return {"ssm_dt.bias": values}
    if name == "norm.weight":
        groups = 1 if is_delta else getattr(config, "mamba_n_groups", getattr(config, "n_groups", 1))
        return {"ssm_norm.weight": values if is_delta else values.reshape(groups, -1)}
    if name == "conv1d.weight":
        return {"ssm_conv1d.weight": values[:, 0]}
    if name == "in_proj_qkvz.weight":
        return _split_qkvz(values, config)
    module, _, suffix = name.rpartition(".")
    if module not in _NAMES or "." in module:
        return None
    if kind == "falcon_h1":
        values = values * _falcon_factor(f"mamba.{name}", config)
    return {f"{_NAMES[module]}.{suffix}": values}


def _split_qkvz(values: np.ndarray, config: PretrainedConfig):
    """Return q, k, v of all heads, and z of all, of rows that have those of each key head together."""
    k_dim, v_dim = config.linear_key_head_dim, config.linear_value_head_dim
    per = config.linear_num_value_heads // config.linear_num_key_heads * v_dim
    heads = values.reshape(config.linear_num_key_heads, 2 * k_dim + 2 * per, -1)
    q, k, v, z = (part.reshape(-1, values.shape[1]) for part in np.split(heads, [k_dim, 2 * k_dim, 2 * k_dim + per], 1))
    return {"attn_qkv.weight": np.concatenate([q, k, v]), "attn_gate.weight": z}


def _tile(name: str, values: np.ndarray, config: PretrainedConfig) -> np.ndarray:
    """Return values with their value heads in the order first of all key heads, second of all key heads, and so on."""
    num_k, num_v, v_dim = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim

    def tile(part, size):
        return part.reshape(num_k, num_v // num_k, size, *part.shape[1:]).swapaxes(0, 1).reshape(part.shape)

    first = 2 * num_k * config.linear_key_head_dim
    if name in ("in_proj_qkv.weight", "conv1d.weight"):
        return np.concatenate([values[:first], tile(values[first:], v_dim)])
    if name == "in_proj_z.weight":
        return tile(values, v_dim)
    if name == "out_proj.weight":
        return tile(values.T, v_dim).T
    return tile(values, 1) if name in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias") else values


def _falcon_factor(name: str, config: PretrainedConfig):
    """Return what the file multiplies a weight of Falcon-H1 with."""
    if name == "mamba.in_proj.weight":
        inner, group = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        sizes = (inner, inner, group, group, config.mamba_n_heads)
        return config.ssm_in_multiplier * np.repeat(np.float32(config.ssm_multipliers), sizes)[:, None]
    return {
        "mamba.out_proj.weight": config.ssm_out_multiplier,
        "feed_forward.gate_proj.weight": config.mlp_multipliers[0],
        "feed_forward.down_proj.weight": config.mlp_multipliers[1],
        "self_attn.q_proj.weight": config.attention_in_multiplier,
        "self_attn.k_proj.weight": config.attention_in_multiplier * config.key_multiplier,
        "self_attn.v_proj.weight": config.attention_in_multiplier,
        "self_attn.o_proj.weight": config.attention_out_multiplier,
    }.get(name, 1.0)
