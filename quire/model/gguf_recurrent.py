"""The metadata of GGUF files of models with a recurrent state as the config.json of their families. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from quire.base.errors import UnsupportedError
from quire.model.gguf_common import (
    RMS_EPS,
    SIGMOID,
    is_tied,
    num_layers_of,
    read_common,
    read_deepseek_experts,
    read_gating,
    vocab_size_of,
)
from quire.model.gguf_keys import GgufKeys
from quire.model.gguf_latent import read_latent

Config = dict[str, object]
_KV_HEADS = "attention.head_count_kv"


def _attended(keys: GgufKeys) -> tuple[list[bool], int]:
    """Return which layers have attention, those with KV heads, and how many KV heads these have."""
    counts = keys.per_layer(_KV_HEADS, num_layers_of(keys))
    found = sorted({count for count in counts if count})
    if len(found) != 1:
        raise keys.metadata.error(f"{keys.architecture}.{_KV_HEADS}", "one number of all layers with attention, 0 of others")
    return [count > 0 for count in counts], found[0]


def _layer_with(keys: GgufKeys, module: str) -> bool:
    """Return whether some layer of the file has a tensor; module: its name in the layer."""
    return any(keys.has_tensor(f"blk.{index}.{module}") for index in range(num_layers_of(keys)))


def _expand(keys: GgufKeys) -> int | float:
    """Return how many times the hidden size a mixer has channels."""
    inner, hidden = keys.required("ssm.inner_size"), keys.required("embedding_length")
    ratio = inner / hidden
    if int(ratio * hidden) != inner:
        raise UnsupportedError(f"{keys.file.path}: ssm.inner_size {inner} is no multiple of embedding_length {hidden}")
    return ratio


def _mamba2(keys: GgufKeys) -> Config:
    """Return the Mamba 2 mixer as Bamba, Granite 4 and Falcon-H1 name it."""
    return {
        "mamba_n_heads": keys.required("ssm.time_step_rank"),
        "mamba_d_head": "auto",
        "mamba_n_groups": keys.required("ssm.group_count"),
        "mamba_d_state": keys.required("ssm.state_size"),
        "mamba_d_conv": keys.required("ssm.conv_kernel"),
        "mamba_expand": _expand(keys),
        "mamba_conv_bias": _layer_with(keys, "ssm_conv1d.bias"),
        "mamba_proj_bias": _layer_with(keys, "ssm_in.bias"),
    }


def _granite_hybrid(keys: GgufKeys) -> Config:
    if keys.raw("rope.scaling.finetuned"):
        raise UnsupportedError(f"{keys.file.path}: hybrid models with a rope (Bamba) are not supported as GGUF files")
    attended, num_kv_heads = _attended(keys)
    num_experts, is_dense = keys.integer("expert_count") or 0, _layer_with(keys, "ffn_gate.weight")
    shared = keys.integer("expert_shared_feed_forward_length") or 0
    if is_dense:
        num_experts, shared = 0, keys.file.tensors["blk.0.ffn_gate.weight"].shape[0]
    return {
        **read_common(keys, num_kv_heads=num_kv_heads),
        **_mamba2(keys),
        "hidden_act": "silu",
        "attention_bias": _layer_with(keys, "attn_q.bias"),
        "attention_multiplier": keys.number("attention.scale"),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
        "position_embedding_type": None,
        "layer_types": ["attention" if one else "mamba" for one in attended],
        "num_local_experts": num_experts,
        "num_experts_per_tok": (keys.integer("expert_used_count") or 1) if num_experts else 1,
        "shared_intermediate_size": shared,
    }


def _nemotron_h(keys: GgufKeys) -> Config:
    """Read Nemotron-H and Nemotron 3; a layer without KV heads and without a feed-forward block is Mamba 2."""
    attended, num_kv_heads = _attended(keys)
    sizes, num_experts = keys.per_layer("feed_forward_length", len(attended)), keys.integer("expert_count") or 0
    kinds = ["*" if one else ("E" if num_experts else "-") if size else "M" for one, size in zip(attended, sizes, strict=True)]
    num_heads, inner = keys.required("ssm.time_step_rank"), keys.required("ssm.inner_size")
    if inner % num_heads:
        raise keys.metadata.error(f"{keys.architecture}.ssm.inner_size", f"a multiple of {num_heads} heads")
    eps = ("layer_norm_epsilon", RMS_EPS[1])
    common = read_common(keys, eps, can_be_partial=True, num_kv_heads=num_kv_heads, inner_size=max(sizes) or 1)
    del common["partial_rotary_factor"]  # there is no rope: files have hidden_size / heads, which need not be a head's size
    has_bias = _layer_with(keys, "ssm_in.bias")
    return {
        **common,
        "hybrid_override_pattern": "".join(kinds),
        "mamba_num_heads": num_heads,
        "mamba_head_dim": inner // num_heads,
        "n_groups": keys.required("ssm.group_count"),
        "ssm_state_size": keys.required("ssm.state_size"),
        "conv_kernel": keys.required("ssm.conv_kernel"),
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "use_bias": has_bias,
        "use_conv_bias": _layer_with(keys, "ssm_conv1d.bias"),
        "mlp_bias": _layer_with(keys, "ffn_up.bias") or _layer_with(keys, "ffn_up_shexp.bias"),
        "attention_bias": _layer_with(keys, "attn_q.bias"),
        **(_nemotron_experts(keys) if num_experts else {}),
    }


def _nemotron_experts(keys: GgufKeys) -> Config:
    keys.integer("expert_shared_count")
    read_gating(keys, SIGMOID, SIGMOID)
    return {
        "n_routed_experts": keys.required("expert_count"),
        "num_experts_per_tok": keys.required("expert_used_count"),
        "moe_intermediate_size": keys.required("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": keys.required("expert_shared_feed_forward_length"),
        "moe_latent_size": keys.integer("moe_latent_size") or None,
        "n_group": keys.integer("expert_group_count") or 1,
        "topk_group": keys.integer("expert_group_used_count") or 1,
        "norm_topk_prob": bool(keys.raw("expert_weights_norm")),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
    }


def _falcon_h1(keys: GgufKeys) -> Config:
    """Read Falcon-H1, whose files have its multipliers in the weights."""
    ones = ("key", "attention_in", "attention_out", "embedding", "lm_head", "ssm_in", "ssm_out")
    return {
        **read_common(keys),
        **_mamba2(keys),
        "mamba_d_ssm": keys.required("ssm.inner_size"),
        "hidden_act": "silu",
        "attention_bias": _layer_with(keys, "attn_q.bias"),
        "mlp_bias": _layer_with(keys, "ffn_gate.bias"),
        "projectors_bias": _layer_with(keys, "ssm_out.bias"),
        "mamba_rms_norm": _layer_with(keys, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        **{f"{name}_multiplier": 1.0 for name in ones},
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
    }


def _jamba(keys: GgufKeys) -> Config:
    attended, num_kv_heads = _attended(keys)
    num_experts = keys.integer("expert_count") or 1
    sparse = [keys.has_tensor(f"blk.{index}.ffn_gate_inp.weight") for index in range(len(attended))]
    experts = {"num_experts": num_experts, "num_experts_per_tok": keys.integer("expert_used_count") or 1}
    return {
        **read_common(keys, num_kv_heads=num_kv_heads),
        "hidden_act": "silu",
        **_period(keys, "attn_layer", attended),
        **(_period(keys, "expert_layer", sparse) if num_experts > 1 else {}),
        **experts,
        "mamba_d_state": keys.required("ssm.state_size"),
        "mamba_d_conv": keys.required("ssm.conv_kernel"),
        "mamba_dt_rank": keys.required("ssm.time_step_rank"),
        "mamba_expand": _expand(keys),
        "mamba_conv_bias": _layer_with(keys, "ssm_conv1d.bias"),
        "mamba_proj_bias": _layer_with(keys, "ssm_in.bias"),
    }


def _period(keys: GgufKeys, kind: str, flags: Sequence[bool]) -> Config:
    """Return the period and the offset of the layers of a kind."""
    found = [index for index, flag in enumerate(flags) if flag] or [len(flags)]
    offset = found[0]
    period = found[1] - offset if len(found) > 1 else max(len(flags), offset + 1)
    if offset >= period or [index % period == offset for index in range(len(flags))] != [*flags]:
        raise UnsupportedError(f"{keys.file.path}: layers {found} ({kind}) have no period")
    return {f"{kind}_period": period, f"{kind}_offset": offset}


def _mamba_only(keys: GgufKeys) -> Config:
    """Return what Mamba and Mamba 2 share."""
    hidden_size = keys.required("embedding_length")
    for name in ("feed_forward_length", "attention.head_count"):
        keys.integer(name)
    return {
        "vocab_size": vocab_size_of(keys, hidden_size),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers_of(keys),
        "layer_norm_epsilon": keys.number(RMS_EPS[1]),
        "tie_word_embeddings": is_tied(keys),
        "max_position_embeddings": keys.required("context_length"),
        "expand": _expand(keys),
        "state_size": keys.required("ssm.state_size"),
        "conv_kernel": keys.required("ssm.conv_kernel"),
        "use_bias": _layer_with(keys, "ssm_in.bias"),
        "use_conv_bias": _layer_with(keys, "ssm_conv1d.bias"),
        "hidden_act": "silu",
    }


def _mamba1(keys: GgufKeys) -> Config:
    """Read Mamba, or Falcon Mamba, whose steps, B and C are normalised."""
    config = {
        **_mamba_only(keys),
        "intermediate_size": keys.required("ssm.inner_size"),
        "time_step_rank": keys.required("ssm.time_step_rank"),
    }
    return {**config, "model_type": "falcon_mamba"} if keys.raw("ssm.dt_b_c_rms") else config


def _mamba2_only(keys: GgufKeys) -> Config:
    num_heads, inner = keys.required("ssm.time_step_rank"), keys.required("ssm.inner_size")
    if inner % num_heads:
        raise keys.metadata.error(f"{keys.architecture}.ssm.inner_size", f"a multiple of {num_heads} heads")
    sizes = {"num_heads": num_heads, "head_dim": inner // num_heads, "n_groups": keys.required("ssm.group_count")}
    return {**_mamba_only(keys), **sizes}


def _lfm2(keys: GgufKeys) -> Config:
    attended, num_kv_heads = _attended(keys)
    return {
        **read_common(keys, ("norm_eps", RMS_EPS[1]), num_kv_heads=num_kv_heads),
        "layer_types": ["full_attention" if one else "conv" for one in attended],
        "conv_L_cache": keys.required("shortconv.l_cache"),
        "conv_bias": _layer_with(keys, "shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe(keys: GgufKeys) -> Config:
    read_gating(keys, SIGMOID, SIGMOID)
    return {
        **_lfm2(keys),
        "num_experts": keys.required("expert_count"),
        "num_experts_per_tok": keys.required("expert_used_count"),
        "moe_intermediate_size": keys.required("expert_feed_forward_length"),
        "num_dense_layers": keys.integer("leading_dense_block_count") or 0,
        "norm_topk_prob": True,
        "use_expert_bias": _layer_with(keys, "exp_probs_b.bias"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
    }


def _gated_delta(keys: GgufKeys) -> Config:
    """Read Qwen3-Next, Qwen3.5 and 3.6; value heads all have the size that ssm.inner_size gives them."""
    num_v_heads, inner = keys.required("ssm.time_step_rank"), keys.required("ssm.inner_size")
    if inner % num_v_heads:
        raise keys.metadata.error(f"{keys.architecture}.ssm.inner_size", f"a multiple of {num_v_heads} heads")
    keys.sections("rope.dimension_sections")
    num_experts = keys.integer("expert_count") or 0
    inner_size = None if keys.integer("feed_forward_length") or not num_experts else keys.required("expert_feed_forward_length")
    return {
        **read_common(keys, can_be_partial=True, inner_size=inner_size),
        "hidden_act": "silu",
        "attention_bias": _layer_with(keys, "attn_q.bias"),
        "full_attention_interval": keys.integer("full_attention_interval") or 4,
        "linear_num_key_heads": keys.required("ssm.group_count"),
        "linear_num_value_heads": num_v_heads,
        "linear_key_head_dim": keys.required("ssm.state_size"),
        "linear_value_head_dim": inner // num_v_heads,
        "linear_conv_kernel_dim": keys.required("ssm.conv_kernel"),
        **(_qwen_experts(keys) if num_experts else {}),
    }


def _qwen_experts(keys: GgufKeys) -> Config:
    inner = keys.required("expert_feed_forward_length")
    found: Config = {
        "num_experts": keys.required("expert_count"),
        "num_experts_per_tok": keys.required("expert_used_count"),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length") or inner,
    }
    if keys.architecture == "qwen3next":
        found |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return found


def _kimi_linear(keys: GgufKeys) -> Config:
    """Read Kimi Linear, whose layers without KV heads are delta nets, with as many heads as attention."""
    attended, _ = _attended(keys)
    read_gating(keys, SIGMOID, SIGMOID)
    numbers = {kind: [index + 1 for index, one in enumerate(attended) if one is kind] for kind in (True, False)}
    config, experts = read_latent(keys), read_deepseek_experts(keys)
    return {
        **config,
        "num_local_experts": experts.pop("n_routed_experts"),
        **experts,
        "norm_topk_prob": True,
        "linear_attn_config": {
            "full_attn_layers": numbers[True],
            "kda_layers": numbers[False],
            "num_heads": config["num_attention_heads"],
            "head_dim": keys.required("kda.head_dim"),
            "short_conv_kernel_size": keys.required("ssm.conv_kernel"),
        },
    }


RECURRENT_READERS: Mapping[str, Callable[[GgufKeys], Config]] = {
    "falcon-h1": _falcon_h1,
    "granitehybrid": _granite_hybrid,
    "jamba": _jamba,
    "kimi-linear": _kimi_linear,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "mamba": _mamba1,
    "mamba2": _mamba2_only,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "qwen35": _gated_delta,
    "qwen35moe": _gated_delta,
    "qwen3next": _gated_delta,
}
"""By general.architecture."""
