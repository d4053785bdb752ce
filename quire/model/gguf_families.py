"""The metadata of further architectures of GGUF files as the config.json of their families. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from quire.base.errors import UnsupportedError
from quire.model.gguf_common import RMS_EPS, is_tied, num_layers_of, read_common, vocab_size_of
from quire.model.gguf_keys import GgufKeys
from quire.model.gguf_rope import DEFAULT_ROPE_BASE, read_rope_scaling

Config = dict[str, object]
_LAYER_EPS = "attention.layer_norm_epsilon"
_SOFTMAX, _SIGMOID = 1, 2
"""What expert_gating_func may say."""


def _has_bias(keys: GgufKeys, module: str) -> bool:
    return keys.has_tensor(f"blk.0.{module}.bias")


def _biases(keys: GgufKeys, gate: str = "ffn_gate") -> Config:
    return {"attention_bias": _has_bias(keys, "attn_q"), "mlp_bias": _has_bias(keys, gate)}


def _plain_llama(keys: GgufKeys) -> Config:
    return {**read_common(keys), **_biases(keys), "hidden_act": "silu"}


def _baichuan(keys: GgufKeys) -> Config:
    if keys.required("block_count") == 40:
        raise UnsupportedError(f"{keys.file.path}: Baichuan 13B, which has ALiBi, is not supported")
    return _plain_llama(keys)


def _minicpm(keys: GgufKeys) -> Config:
    config = read_common(keys)
    return {
        **config,
        **_biases(keys),
        "hidden_act": "silu",
        "attention_multiplier": cast("int", config["head_dim"]) ** -0.5,
        "embedding_multiplier": keys.number("embedding_scale"),
        "residual_multiplier": keys.number("residual_scale"),
        "logits_scaling": keys.number("logit_scale"),
    }


def _arcee(keys: GgufKeys) -> Config:
    return {**read_common(keys), **_biases(keys, "ffn_up"), "hidden_act": "relu2"}


def _smollm3(keys: GgufKeys) -> Config:
    """Read SmolLM3; that each fourth layer has no rope, its files do not say."""
    return {**_plain_llama(keys), "no_rope_layer_interval": 4, "use_sliding_window": False}


def _apertus(keys: GgufKeys) -> Config:
    """Read Apertus; the numbers of its activation function are read with the tensors."""
    return {**read_common(keys), "hidden_act": "xielu", "attention_bias": _has_bias(keys, "attn_q")}


def _seed_oss(keys: GgufKeys) -> Config:
    return {**_plain_llama(keys), "attention_out_bias": _has_bias(keys, "attn_output")}


def _qwen3_vl(keys: GgufKeys) -> Config:
    """Read the language model of Qwen3-VL: of text alone, its three-part positions are plain ones."""
    keys.raw("n_deepstack_layers")
    keys.sections("rope.dimension_sections")
    return {**read_common(keys), "hidden_act": "silu", "use_sliding_window": False}


def _glm4(keys: GgufKeys) -> Config:
    return {**read_common(keys, can_be_partial=True), "hidden_act": "silu", "attention_bias": _has_bias(keys, "attn_q")}


def _chatglm(keys: GgufKeys) -> Config:
    """Read ChatGLM 2 and 3 and the first GLM-4, whose q, k and v lie in one matrix, or GLM-4 as transformers has it."""
    return {**_glm4(keys), "attention_bias": _has_bias(keys, "attn_q") or _has_bias(keys, "attn_qkv")}


def _cohere(keys: GgufKeys) -> Config:
    return {
        **read_common(keys, ("layer_norm_eps", _LAYER_EPS)),
        "hidden_act": "silu",
        "logit_scale": keys.number("logit_scale"),
        "attention_bias": _has_bias(keys, "attn_q"),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _cohere2(keys: GgufKeys) -> Config:
    config = {**_cohere(keys), "sliding_window": keys.required("attention.sliding_window")}
    return {**config, **_window_pattern(keys, 4)}


def _window_pattern(keys: GgufKeys, period: int) -> Config:
    """Return which layers have a window: those that the file names, or all but each so many-th."""
    slides = keys.flags("attention.sliding_window_pattern")
    if slides is None:
        return {"sliding_window_pattern": keys.integer("attention.sliding_window_pattern") or period}
    return {"layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides]}


def _exaone4(keys: GgufKeys) -> Config:
    window = keys.integer("attention.sliding_window") or None
    pattern = {} if window is None else _window_pattern(keys, 4)
    return {**read_common(keys), "hidden_act": "silu", "sliding_window": window, **pattern}


def _ernie4_5(keys: GgufKeys) -> Config:
    return {**read_common(keys), "hidden_act": "silu", "use_bias": _has_bias(keys, "attn_q")}


def _ernie4_5_moe(keys: GgufKeys) -> Config:
    return {
        **_ernie4_5(keys),
        "moe_num_experts": keys.required("expert_count"),
        "moe_k": keys.required("expert_used_count"),
        "moe_intermediate_size": keys.required("expert_feed_forward_length"),
        "moe_num_shared_experts": _num_shared(keys),
        "moe_layer_start_index": keys.integer("leading_dense_block_count") or 0,
        "moe_layer_interval": keys.integer("interleave_moe_layer_step") or 1,
        "moe_layer_end_index": -1,
    }


def _num_shared(keys: GgufKeys) -> int:
    """Return as how many experts the shared one is wide."""
    width, count = keys.integer("expert_shared_feed_forward_length"), keys.integer("expert_shared_count") or 0
    inner = keys.required("expert_feed_forward_length")
    if width and width % inner:
        raise keys.metadata.error(f"{keys.architecture}.expert_shared_feed_forward_length", f"a multiple of {inner}")
    return width // inner if width else count


def _hunyuan(keys: GgufKeys) -> Config:
    """Read Hunyuan, whose files have the base of the rope with its alpha in it."""
    return {**_plain_llama(keys), "rope_scaling": None}


def _hunyuan_moe(keys: GgufKeys) -> Config:
    inner = keys.integer("expert_feed_forward_length") or keys.required("feed_forward_length")
    if keys.integer("expert_shared_feed_forward_length") not in (None, inner):
        raise UnsupportedError(f"{keys.file.path}: expert_shared_feed_forward_length must be the width of experts ({inner})")
    experts = {"num_experts": keys.required("expert_count"), "moe_topk": keys.required("expert_used_count")}
    return {**_hunyuan(keys), **experts, "intermediate_size": inner}


def _nemotron(keys: GgufKeys) -> Config:
    return {
        **read_common(keys, ("norm_eps", _LAYER_EPS), can_be_partial=True),
        **_biases(keys, "ffn_up"),
        "hidden_act": "relu2",
    }


def _starcoder2(keys: GgufKeys) -> Config:
    config = read_common(keys, ("norm_epsilon", _LAYER_EPS))
    window = keys.integer("attention.sliding_window") or None
    has_bias = _has_bias(keys, "attn_q")
    return {**config, "hidden_act": "gelu_pytorch_tanh", "use_bias": has_bias, "sliding_window": window}


def _stablelm(keys: GgufKeys) -> Config:
    if keys.has_tensor("blk.0.attn_q_norm.weight"):
        raise UnsupportedError(f"{keys.file.path}: StableLM with norms of heads is not supported as a GGUF file")
    return {
        **read_common(keys, ("layer_norm_eps", _LAYER_EPS), can_be_partial=True),
        "hidden_act": "silu",
        "use_qkv_bias": _has_bias(keys, "attn_q"),
        "use_parallel_residual": not keys.has_tensor("blk.0.ffn_norm.weight"),
        "qk_layernorm": False,
        **_ignored(keys, "use_parallel_residual"),
    }


def _gpt_neox(keys: GgufKeys) -> Config:
    return {
        **read_common(keys, ("layer_norm_eps", _LAYER_EPS), can_be_partial=True),
        "hidden_act": "gelu",
        "attention_bias": _has_bias(keys, "attn_qkv"),
        "use_parallel_residual": keys.raw("use_parallel_residual") is not False and keys.raw("use_parallel_residual") != 0,
    }


def _phi2(keys: GgufKeys) -> Config:
    config = read_common(keys, ("layer_norm_eps", _LAYER_EPS), can_be_partial=True)
    return {**config, "hidden_act": "gelu_new", "qk_layernorm": keys.has_tensor("blk.0.attn_q_norm.weight")}


def _ignored(keys: GgufKeys, name: str) -> Config:
    """Read a key that something else says as well."""
    keys.raw(name)
    return {}


def _qwen2_moe(keys: GgufKeys) -> Config:
    inner = keys.required("expert_feed_forward_length")
    return {
        **read_common(keys),
        "hidden_act": "silu",
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length")
        or keys.required("feed_forward_length"),
        "num_experts": keys.required("expert_count"),
        "num_experts_per_tok": keys.required("expert_used_count"),
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": _has_bias(keys, "attn_q"),
        "use_sliding_window": False,
    }


def _olmoe(keys: GgufKeys) -> Config:
    return {
        **read_common(keys),
        "hidden_act": "silu",
        "attention_bias": _has_bias(keys, "attn_q"),
        "num_experts": keys.required("expert_count"),
        "num_experts_per_tok": keys.required("expert_used_count"),
        "norm_topk_prob": False,
        "intermediate_size": keys.integer("expert_feed_forward_length") or keys.required("feed_forward_length"),
    }


def _granite_moe(keys: GgufKeys) -> Config:
    shared = keys.integer("expert_shared_feed_forward_length") or 0
    return {
        **read_common(keys),
        "model_type": "granitemoeshared" if shared else "granitemoe",
        "hidden_act": "silu",
        "attention_bias": _has_bias(keys, "attn_q"),
        "attention_multiplier": keys.number("attention.scale"),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
        "num_local_experts": keys.required("expert_count"),
        "num_experts_per_tok": keys.required("expert_used_count"),
        **({"shared_intermediate_size": shared} if shared else {}),
    }


def _llama4(keys: GgufKeys) -> Config:
    """Read Llama 4; the pattern of rope, the scale of queries and the size of chunks are the same in all its files.

    Maverick, of 128 experts, has no norms of heads.
    """
    num_experts = keys.required("expert_count")
    for name in ("attention.chunk_size", "attention.temperature_length", "attention.temperature_scale"):
        keys.raw(name)
    inner = keys.required("expert_feed_forward_length")
    if keys.integer("expert_shared_feed_forward_length") not in (None, 0, inner):
        raise UnsupportedError(f"{keys.file.path}: expert_shared_feed_forward_length must be the width of experts ({inner})")
    config = read_common(keys)
    _gating(keys, _SIGMOID, _SIGMOID)
    return {
        **config,
        "hidden_act": "silu",
        "attention_bias": _has_bias(keys, "attn_q"),
        "intermediate_size_mlp": config["intermediate_size"],
        "intermediate_size": inner,
        "num_local_experts": num_experts,
        "num_experts_per_tok": keys.required("expert_used_count"),
        "interleave_moe_layer_step": keys.integer("interleave_moe_layer_step") or 1,
        "use_qk_norm": num_experts != 128,
    }


def _minimax_m2(keys: GgufKeys) -> Config:
    _gating(keys, _SIGMOID, _SIGMOID)
    return {
        **read_common(keys, can_be_partial=True),
        "hidden_act": "silu",
        "intermediate_size": keys.required("expert_feed_forward_length"),
        "num_local_experts": keys.required("expert_count"),
        "num_experts_per_tok": keys.required("expert_used_count"),
    }


def _gating(keys: GgufKeys, default: int, *supported: int) -> int:
    """Return which function makes scores of experts."""
    found = keys.integer("expert_gating_func") or default
    if found not in supported:
        names = " or ".join(map(str, supported))
        raise UnsupportedError(f"{keys.file.path}: expert_gating_func {found} is not supported; supported: {names}")
    return found


def _deepseek_experts(keys: GgufKeys) -> Config:
    """Return the mixture of DeepSeek and those after it."""
    return {
        "n_routed_experts": keys.required("expert_count"),
        "num_experts_per_tok": keys.required("expert_used_count"),
        "moe_intermediate_size": keys.required("expert_feed_forward_length"),
        "n_shared_experts": keys.integer("expert_shared_count") or 0,
        "first_k_dense_replace": keys.integer("leading_dense_block_count") or 0,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": bool(keys.raw("expert_weights_norm")),
        "n_group": keys.integer("expert_group_count") or 1,
        "topk_group": keys.integer("expert_group_used_count") or 1,
    }


def _without_drafting_layers(keys: GgufKeys, config: Config) -> Config:
    """Return a config without the last layers, where those only draft."""
    return {**config, "num_hidden_layers": num_layers_of(keys) - (keys.integer("nextn_predict_layers") or 0)}


def _glm4_moe(keys: GgufKeys) -> Config:
    _gating(keys, _SIGMOID, _SIGMOID)
    config: Config = {
        **read_common(keys, can_be_partial=True),
        **_deepseek_experts(keys),
        "hidden_act": "silu",
        "attention_bias": _has_bias(keys, "attn_q"),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }
    return _without_drafting_layers(keys, config)


def _dots1(keys: GgufKeys) -> Config:
    _gating(keys, _SIGMOID, _SIGMOID)
    config: Config = {**read_common(keys), **_deepseek_experts(keys), "hidden_act": "silu", "sliding_window": None}
    return {**config, "attention_bias": _has_bias(keys, "attn_q")}


def _deepseek2(keys: GgufKeys) -> Config:
    """Read DeepSeek V2 (softmax) or V3, R1 and Kimi K2 (sigmoid); sizes of heads are those of the files before or with MLA."""
    hidden_size, num_heads = keys.required("embedding_length"), keys.required("attention.head_count")
    kv_rank, rope_dim = keys.required("attention.kv_lora_rank"), keys.required("rope.dimension_count")
    plain, with_mla = keys.integer("attention.key_length"), keys.integer("attention.key_length_mla")
    plain_value, with_mla_value = keys.integer("attention.value_length"), keys.integer("attention.value_length_mla")
    head_dim, value_dim = with_mla or plain, with_mla_value or plain_value
    if not head_dim or not value_dim or head_dim <= rope_dim:
        raise keys.metadata.error(f"{keys.architecture}.attention.key_length", f"an integer above {rope_dim}")
    keys.integer("attention.head_count_kv")
    config: Config = {
        "vocab_size": vocab_size_of(keys, hidden_size),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers_of(keys),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "q_lora_rank": keys.integer("attention.q_lora_rank") or None,
        "kv_lora_rank": kv_rank,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": head_dim - rope_dim,
        "v_head_dim": value_dim,
        "intermediate_size": keys.required("feed_forward_length"),
        RMS_EPS[0]: keys.number(RMS_EPS[1]),
        "max_position_embeddings": keys.required("context_length"),
        "rope_theta": keys.number("rope.freq_base", DEFAULT_ROPE_BASE),
        "tie_word_embeddings": is_tied(keys),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **_deepseek_experts(keys),
    }
    scaling = read_rope_scaling(keys, rope_dim)
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    if scaling and multiplier:
        scaling |= {"mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}
    config |= {"rope_scaling": scaling} if scaling else {}
    config = _without_drafting_layers(keys, config)
    if _gating(keys, _SOFTMAX, _SOFTMAX, _SIGMOID) == _SIGMOID:
        return {**config, "rope_interleave": True}
    method = "group_limited_greedy" if cast("int", config["n_group"]) > 1 else "greedy"
    return {**config, "model_type": "deepseek_v2", "topk_method": method}


FAMILY_READERS: Mapping[str, Callable[[GgufKeys], Config]] = {
    "apertus": _apertus,
    "arcee": _arcee,
    "baichuan": _baichuan,
    "chatglm": _chatglm,
    "cohere2": _cohere2,
    "command-r": _cohere,
    "deepseek2": _deepseek2,
    "dots1": _dots1,
    "ernie4_5": _ernie4_5,
    "ernie4_5-moe": _ernie4_5_moe,
    "exaone": _plain_llama,
    "exaone4": _exaone4,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "gptneox": _gpt_neox,
    "granitemoe": _granite_moe,
    "hunyuan-dense": _hunyuan,
    "hunyuan-moe": _hunyuan_moe,
    "internlm2": _plain_llama,
    "llama4": _llama4,
    "minicpm": _minicpm,
    "minimax-m2": _minimax_m2,
    "nemotron": _nemotron,
    "olmoe": _olmoe,
    "phi2": _phi2,
    "qwen2moe": _qwen2_moe,
    "qwen3vl": _qwen3_vl,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
"""By general.architecture; those of gguf_config.py are read by their model types."""
