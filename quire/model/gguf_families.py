"""The metadata of further architectures of GGUF files as the config.json of their families. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isclose
from typing import cast

from quire.base.errors import UnsupportedError
from quire.model.families.baichuan import VOCAB_SIZE_OF_2
from quire.model.gguf_common import (
    RMS_EPS,
    SIGMOID,
    SOFTMAX,
    has_bias,
    num_layers_of,
    read_common,
    read_deepseek_experts,
    read_gating,
    read_window_pattern,
)
from quire.model.gguf_keys import GgufKeys

Config = dict[str, object]
_LAYER_EPS = "attention.layer_norm_epsilon"
_EPS_OF_OLMO = 1e-5


def _biases(keys: GgufKeys, gate: str = "ffn_gate") -> Config:
    return {"attention_bias": has_bias(keys, "attn_q"), "mlp_bias": has_bias(keys, gate)}


def _plain_llama(keys: GgufKeys) -> Config:
    return {**read_common(keys), **_biases(keys), "hidden_act": "silu"}


def _baichuan(keys: GgufKeys) -> Config:
    if keys.required("block_count") == 40:
        raise UnsupportedError(f"{keys.file.path}: Baichuan 13B, which has ALiBi, is not supported")
    config = _plain_llama(keys)
    if config["vocab_size"] == VOCAB_SIZE_OF_2:
        raise UnsupportedError(
            f"{keys.file.path}: vocab_size {VOCAB_SIZE_OF_2}, Baichuan 2, is not supported, as the file does not say whether "
            "its head is normalised; load its safetensors"
        )
    return config


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
    return {**read_common(keys), "hidden_act": "xielu", "attention_bias": has_bias(keys, "attn_q")}


def _seed_oss(keys: GgufKeys) -> Config:
    return {**_plain_llama(keys), "attention_out_bias": has_bias(keys, "attn_output")}


def _qwen_vl(keys: GgufKeys) -> Config:
    """Read the language model of Qwen2-VL, 2.5-VL and 3-VL: of text alone, its three-part positions are plain ones."""
    keys.raw("n_deepstack_layers")
    keys.sections("rope.dimension_sections")
    return {**read_common(keys), "hidden_act": "silu", "use_sliding_window": False}


def _qwen3_vl_moe(keys: GgufKeys) -> Config:
    return {**_qwen_vl(keys), **read_qwen3_experts(keys)}


def read_qwen3_experts(keys: GgufKeys) -> Config:
    """Return the mixtures of Qwen3, one in each layer."""
    return {
        "moe_intermediate_size": keys.required("expert_feed_forward_length"),
        "num_experts": keys.required("expert_count"),
        "num_experts_per_tok": keys.required("expert_used_count"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _glm4(keys: GgufKeys) -> Config:
    return {**read_common(keys, can_be_partial=True), "hidden_act": "silu", "attention_bias": has_bias(keys, "attn_q")}


def _chatglm(keys: GgufKeys) -> Config:
    """Read ChatGLM 2 and 3 and the first GLM-4, whose q, k and v lie in one matrix, or GLM-4 as transformers has it."""
    return {**_glm4(keys), "attention_bias": has_bias(keys, "attn_q")}


def _cohere(keys: GgufKeys) -> Config:
    return {
        **read_common(keys, ("layer_norm_eps", _LAYER_EPS)),
        "hidden_act": "silu",
        "logit_scale": keys.number("logit_scale"),
        "attention_bias": has_bias(keys, "attn_q"),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _cohere2(keys: GgufKeys) -> Config:
    config = {**_cohere(keys), "sliding_window": keys.required("attention.sliding_window")}
    return {**config, **read_window_pattern(keys, 4)}


def _exaone4(keys: GgufKeys) -> Config:
    window = keys.integer("attention.sliding_window") or None
    pattern = {} if window is None else read_window_pattern(keys, 4)
    return {**read_common(keys), "hidden_act": "silu", "sliding_window": window, **pattern}


def _exaone_moe(keys: GgufKeys) -> Config:
    read_gating(keys, SIGMOID, SIGMOID)
    inner, shared = keys.required("expert_feed_forward_length"), keys.integer("expert_shared_feed_forward_length")
    experts = read_deepseek_experts(keys)
    if shared not in (None, inner * cast("int", experts["n_shared_experts"])):
        key = f"{keys.architecture}.expert_shared_feed_forward_length"
        raise keys.metadata.error(key, f"expert_shared_count times {inner}")
    counts = {"num_experts": experts.pop("n_routed_experts"), "num_shared_experts": experts.pop("n_shared_experts")}
    return {**_exaone4(keys), **experts, **counts}


def _ernie4_5(keys: GgufKeys) -> Config:
    return {**read_common(keys), "hidden_act": "silu", "use_bias": has_bias(keys, "attn_q")}


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
    """Return as how many experts the shared one is wide; the key of its width holds something else in some files."""
    inner = keys.required("expert_feed_forward_length")
    keys.integer("expert_shared_feed_forward_length")
    last = keys.file.tensors.get(f"blk.{num_layers_of(keys) - 1}.ffn_up_shexp.weight")
    count = keys.integer("expert_shared_count") or 0
    return count if last is None else last.shape[0] // inner


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
    return {**config, "hidden_act": "gelu_pytorch_tanh", "use_bias": has_bias(keys, "attn_q"), "sliding_window": window}


def _stablelm(keys: GgufKeys) -> Config:
    if keys.has_tensor("blk.0.attn_q_norm.weight"):
        raise UnsupportedError(f"{keys.file.path}: StableLM with norms of heads is not supported as a GGUF file")
    return {
        **read_common(keys, ("layer_norm_eps", _LAYER_EPS), can_be_partial=True),
        "hidden_act": "silu",
        "use_qkv_bias": has_bias(keys, "attn_q"),
        "use_parallel_residual": not keys.has_tensor("blk.0.ffn_norm.weight"),
        "qk_layernorm": False,
        **_ignored(keys, "use_parallel_residual"),
    }


def _gpt_neox(keys: GgufKeys) -> Config:
    return {
        **read_common(keys, ("layer_norm_eps", _LAYER_EPS), can_be_partial=True),
        "hidden_act": "gelu",
        "attention_bias": has_bias(keys, "attn_qkv"),
        "use_parallel_residual": keys.raw("use_parallel_residual") is not False and keys.raw("use_parallel_residual") != 0,
    }


def _phi2(keys: GgufKeys) -> Config:
    config = read_common(keys, ("layer_norm_eps", _LAYER_EPS), can_be_partial=True)
    return {**config, "hidden_act": "gelu_new", "qk_layernorm": keys.has_tensor("blk.0.attn_q_norm.weight")}


def _phimoe(keys: GgufKeys) -> Config:
    """Read Phi-3.5-MoE; its files have the scale of LongRoPE that follows from the lengths, as those of Phi-3."""
    config = read_common(keys)
    original = keys.integer("rope.scaling.original_context_length") or config["max_position_embeddings"]
    return {
        **config,
        "hidden_act": "silu",
        "sliding_window": keys.integer("attention.sliding_window") or None,
        "original_max_position_embeddings": original,
        "attention_bias": has_bias(keys, "attn_q"),
        "lm_head_bias": keys.has_tensor("output.bias"),
        "num_local_experts": keys.required("expert_count"),
        "num_experts_per_tok": keys.required("expert_used_count"),
    }


def _olmo(keys: GgufKeys) -> Config:
    """Read OLMo, whose norms have no weights."""
    eps = keys.number(_LAYER_EPS)
    if not isclose(eps, _EPS_OF_OLMO, rel_tol=1e-6):
        raise UnsupportedError(f"{keys.file.path}: {_LAYER_EPS} {eps} is not supported; supported: {_EPS_OF_OLMO}")
    clip = keys.number("attention.clamp_kqv", 0.0) or None
    config = read_common(keys, ("layer_norm_eps", _LAYER_EPS))
    return {**config, "hidden_act": "silu", "attention_bias": has_bias(keys, "attn_q"), "clip_qkv": clip}


def _mistral3(keys: GgufKeys) -> Config:
    """Read Ministral 3, or, where there are no longer positions than those of training, Mistral Small 3.1 and 3.2."""
    config: Config = {**read_common(keys), "hidden_act": "silu"}
    beta, multiplier = keys.number("attention.temperature_scale", 0.0), keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    scaling = cast("Config", config.get("rope_scaling", {}))
    if scaling.get("rope_type") != "yarn":
        if beta or multiplier:
            raise UnsupportedError(f"{keys.file.path}: attention.temperature_scale needs rope.scaling.type 'yarn'")
        return {**config, "model_type": "mistral", "sliding_window": None}
    scaling |= {"mscale": 1.0, "mscale_all_dim": multiplier} if multiplier else {}
    scaling |= {"llama_4_scaling_beta": beta} if beta else {}
    return {**config, "rope_scaling": scaling}


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
        "qkv_bias": has_bias(keys, "attn_q"),
        "use_sliding_window": False,
    }


def _olmoe(keys: GgufKeys) -> Config:
    return {
        **read_common(keys),
        "hidden_act": "silu",
        "attention_bias": has_bias(keys, "attn_q"),
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
        "attention_bias": has_bias(keys, "attn_q"),
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
    read_gating(keys, SIGMOID, SIGMOID)
    return {
        **config,
        "hidden_act": "silu",
        "attention_bias": has_bias(keys, "attn_q"),
        "intermediate_size_mlp": config["intermediate_size"],
        "intermediate_size": inner,
        "num_local_experts": num_experts,
        "num_experts_per_tok": keys.required("expert_used_count"),
        "interleave_moe_layer_step": keys.integer("interleave_moe_layer_step") or 1,
        "use_qk_norm": num_experts != 128,
    }


def _minimax_m2(keys: GgufKeys) -> Config:
    read_gating(keys, SIGMOID, SIGMOID)
    return {
        **read_common(keys, can_be_partial=True),
        "hidden_act": "silu",
        "intermediate_size": keys.required("expert_feed_forward_length"),
        "num_local_experts": keys.required("expert_count"),
        "num_experts_per_tok": keys.required("expert_used_count"),
    }


def _glm4_moe(keys: GgufKeys) -> Config:
    read_gating(keys, SIGMOID, SIGMOID)
    return {
        **read_common(keys, can_be_partial=True),
        **read_deepseek_experts(keys),
        "hidden_act": "silu",
        "attention_bias": has_bias(keys, "attn_q"),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _dots1(keys: GgufKeys) -> Config:
    read_gating(keys, SIGMOID, SIGMOID)
    config: Config = {**read_common(keys), **read_deepseek_experts(keys), "hidden_act": "silu", "sliding_window": None}
    return {**config, "attention_bias": has_bias(keys, "attn_q")}


def _jais2(keys: GgufKeys) -> Config:
    return {**read_common(keys, ("layer_norm_eps", _LAYER_EPS)), **_biases(keys, "ffn_up"), "hidden_act": "relu2"}


def _bloom(keys: GgufKeys) -> Config:
    config = read_common(keys, ("layer_norm_epsilon", _LAYER_EPS))
    heads = {"n_layer": config["num_hidden_layers"], "n_head": config["num_attention_heads"]}
    return {**config, **heads, "seq_length": config["max_position_embeddings"]}


def _falcon(keys: GgufKeys) -> Config:
    """Read Falcon 7B, 40B (two norms) or 11B."""
    config = read_common(keys, ("layer_norm_epsilon", _LAYER_EPS))
    has_two_norms = keys.has_tensor("blk.0.attn_norm_2.weight")
    return {
        **config,
        "num_kv_heads": config["num_key_value_heads"],
        "new_decoder_architecture": has_two_norms or config["num_key_value_heads"] != 1,
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
        "ffn_hidden_size": config["intermediate_size"],
        "bias": has_bias(keys, "attn_qkv"),
    }


def _granite_swa(keys: GgufKeys) -> Config:
    if keys.integer("expert_count"):
        raise UnsupportedError(f"{keys.file.path}: Granite with windows and experts is not supported as a GGUF file")
    scales = {"attention_multiplier": keys.number("attention.scale"), "logits_scaling": keys.number("logit_scale", 1.0)}
    scales |= {f"{name}_multiplier": keys.number(f"{name}_scale", 1.0) for name in ("embedding", "residual")}
    window = keys.required("attention.sliding_window")
    return {**_plain_llama(keys), **scales, "sliding_window": window, **_layer_types(keys, lambda index: index % 4 != 0)}


def _layer_types(keys: GgufKeys, default: Callable[[int], bool]) -> Config:
    """Return which layers have a window: those that the file names, or by a rule."""
    slides = keys.flags("attention.sliding_window_pattern") or [default(index) for index in range(num_layers_of(keys))]
    return {"layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides]}


def _mellum(keys: GgufKeys) -> Config:
    config = {**read_common(keys), **read_qwen3_experts(keys), "hidden_act": "silu"}
    config |= {"sliding_window": keys.integer("attention.sliding_window") or None}
    local = keys.number("rope.freq_base_swa", cast("float", config["rope_theta"]))
    return {**config, **_layer_types(keys, lambda index: index % 4 < 3), "rope_local_base_freq": local}


def _experts(keys: GgufKeys) -> Config:
    """Return counts and sizes of experts under the names of most families."""
    return {
        "num_experts": keys.required("expert_count"),
        "num_experts_per_tok": keys.required("expert_used_count"),
        "moe_intermediate_size": keys.required("expert_feed_forward_length"),
        "hidden_act": "silu",
    }


def _afmoe(keys: GgufKeys) -> Config:
    """Read AFMoE; what its files do not say is as in the released models."""
    read_gating(keys, SIGMOID, SIGMOID)
    keys.raw("expert_weights_norm")
    return {
        **read_common(keys),
        **_experts(keys),
        "num_shared_experts": keys.integer("expert_shared_count") or 0,
        "num_dense_layers": keys.integer("leading_dense_block_count") or 0,
        "route_scale": keys.number("expert_weights_scale", 1.0),
        "sliding_window": keys.required("attention.sliding_window"),
        "global_attn_every_n_layers": 4,
        "mup_enabled": True,
    }


def _hy_v3(keys: GgufKeys) -> Config:
    read_gating(keys, SIGMOID, SIGMOID)
    keys.raw("expert_weights_norm")
    return {
        **read_common(keys),
        **_experts(keys),
        "num_shared_experts": _num_shared(keys),
        "router_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "mlp_bias": has_bias(keys, "ffn_up"),
    }


def _cohere2_moe(keys: GgufKeys) -> Config:
    """Read Cohere 2 with experts; its files are of models that take the mean of experts and shared experts."""
    is_rms = keys.raw("attention.layer_norm_rms_epsilon") is not None
    config = {**read_common(keys, RMS_EPS if is_rms else ("layer_norm_eps", _LAYER_EPS)), **_experts(keys)}
    keys.integer("expert_shared_feed_forward_length")
    return {
        **config,
        "intermediate_size": config["moe_intermediate_size"],
        "prefix_dense_intermediate_size": config["intermediate_size"],
        "first_k_dense_replace": keys.integer("leading_dense_block_count") or 0,
        "num_shared_experts": keys.integer("expert_shared_count") or 0,
        "expert_selection_fn": "softmax" if read_gating(keys, SIGMOID, SOFTMAX, SIGMOID) == SOFTMAX else "sigmoid",
        "norm_topk_prob": bool(keys.raw("expert_weights_norm")),
        "logit_scale": keys.number("logit_scale"),
        "sliding_window": keys.required("attention.sliding_window"),
        **_layer_types(keys, lambda index: index % 4 != 0),
    }


FAMILY_READERS: Mapping[str, Callable[[GgufKeys], Config]] = {
    "afmoe": _afmoe,
    "apertus": _apertus,
    "arcee": _arcee,
    "baichuan": _baichuan,
    "bloom": _bloom,
    "chatglm": _chatglm,
    "cohere2": _cohere2,
    "cohere2moe": _cohere2_moe,
    "command-r": _cohere,
    "dots1": _dots1,
    "ernie4_5": _ernie4_5,
    "ernie4_5-moe": _ernie4_5_moe,
    "exaone": _plain_llama,
    "exaone-moe": _exaone_moe,
    "exaone4": _exaone4,
    "falcon": _falcon,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "gptneox": _gpt_neox,
    "granite_swa": _granite_swa,
    "granitemoe": _granite_moe,
    "hunyuan-dense": _hunyuan,
    "hunyuan-moe": _hunyuan_moe,
    "hy_v3": _hy_v3,
    "internlm2": _plain_llama,
    "jais2": _jais2,
    "llama4": _llama4,
    "mellum": _mellum,
    "minicpm": _minicpm,
    "minimax-m2": _minimax_m2,
    "mistral3": _mistral3,
    "nemotron": _nemotron,
    "olmo": _olmo,
    "olmoe": _olmoe,
    "phi2": _phi2,
    "phimoe": _phimoe,
    "qwen2moe": _qwen2_moe,
    "qwen2vl": _qwen_vl,
    "qwen3vl": _qwen_vl,
    "qwen3vlmoe": _qwen3_vl_moe,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
"""By general.architecture; those of gguf_config.py are read by their model types."""
