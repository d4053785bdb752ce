"""The metadata of GGUF files of Gemma 3n and 4 as the config.json of their families. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import NormalDist

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.model.gguf_common import RMS_EPS, has_bias, is_tied, num_layers_of, read_window_pattern, vocab_size_of
from quire.model.gguf_keys import GgufKeys
from quire.model.gguf_rope import DEFAULT_ROPE_BASE, read_rope_factors, read_rope_scaling

Config = dict[str, object]
_SOFTCAP = 30.0
"""Of the logits, in all released models; llama.cpp takes it where a file does not say it."""
_NUM_OWN_OF_3N = 20
"""Layers with keys and values of their own in Gemma 3n, of files that do not say it."""
_NEVER = 1e29
"""Frequencies that are divided by so much stand still: proportional ropes are stored in this way."""


def _common(keys: GgufKeys) -> Config:
    """Return what both share, but for the sizes of heads and of feed-forward blocks."""
    hidden_size = keys.required("embedding_length")
    size = keys.integer("embedding_length_per_layer_input") or 0
    return {
        "vocab_size": vocab_size_of(keys, hidden_size),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers_of(keys),
        "num_attention_heads": keys.required("attention.head_count"),
        "attention_bias": has_bias(keys, "attn_q"),
        "hidden_activation": "gelu_pytorch_tanh",
        RMS_EPS[0]: keys.number(RMS_EPS[1]),
        "max_position_embeddings": keys.required("context_length"),
        "sliding_window": keys.required("attention.sliding_window"),
        "final_logit_softcapping": keys.number("final_logit_softcapping", _SOFTCAP) or None,
        "tie_word_embeddings": is_tied(keys),
        "hidden_size_per_layer_input": size,
        "vocab_size_per_layer_input": _shape(keys, "per_layer_token_embd.weight")[0] if size else 1,
    }


def _shape(keys: GgufKeys, name: str) -> tuple[int, int]:
    tensor = keys.file.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        raise ModelFormatError(f"{keys.file.path} must hold a matrix {name}")
    return tensor.shape[0], tensor.shape[1]


def _gemma3n(keys: GgufKeys) -> Config:
    config, head_dim = _common(keys), keys.required("attention.key_length")
    if keys.integer("attention.value_length") not in (None, head_dim) or read_rope_scaling(keys, head_dim):
        raise UnsupportedError(f"{keys.file.path}: attention.value_length or rope.scaling of a Gemma 3n model is not supported")
    num_layers = num_layers_of(keys)
    shared = keys.integer("attention.shared_kv_layers")
    sparsity = keys.numbers("activation_sparsity_scale")
    return {
        **config,
        **read_window_pattern(keys, 5),
        "head_dim": head_dim,
        "num_key_value_heads": keys.required("attention.head_count_kv"),
        "intermediate_size": keys.per_layer("feed_forward_length", num_layers),
        "num_kv_shared_layers": max(num_layers - _NUM_OWN_OF_3N, 0) if shared is None else shared,
        # A file has how many standard deviations above the mean a value must be; the config which share of them is not.
        "activation_sparsity_pattern": None if sparsity is None else [NormalDist().cdf(scale) for scale in sparsity],
        "altup_active_idx": keys.integer("altup.active_idx") or 0,
        "altup_num_inputs": keys.required("altup.num_inputs"),
        "altup_correct_scale": True,
        "laurel_rank": _shape(keys, "blk.0.laurel_l.weight")[0],
        "rope_theta": keys.number("rope.freq_base", 1e6),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", DEFAULT_ROPE_BASE),
    }


def _gemma4(keys: GgufKeys) -> Config:
    config, num_layers = _common(keys), num_layers_of(keys)
    slides = keys.flags("attention.sliding_window_pattern")
    if slides is None or len(slides) < num_layers or slides[num_layers - 1]:
        raise keys.metadata.error(
            f"{keys.architecture}.attention.sliding_window_pattern", f"{num_layers} booleans, the last one false"
        )
    slides = slides[:num_layers]
    full_dim, head_dim = keys.required("attention.key_length"), keys.required("attention.key_length_swa")
    for name, size in (("attention.value_length", full_dim), ("attention.value_length_swa", head_dim)):
        if keys.integer(name) not in (None, size):
            raise UnsupportedError(f"{keys.file.path}: {name} must be the size of a key ({size})")
    counts = keys.per_layer("attention.head_count_kv", num_layers)
    full = {
        str(index): {"head_dim": full_dim, "num_key_value_heads": counts[index]}
        for index in range(num_layers)
        if not slides[index]
    }
    first_full = slides.index(False)
    num_experts = keys.integer("expert_count") or 0
    shared = keys.integer("attention.shared_kv_layers") or 0
    return {
        **config,
        "layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides],
        "head_dim": head_dim,
        "num_key_value_heads": next((count for count, is_sliding in zip(counts, slides, strict=True) if is_sliding), counts[0]),
        "per_layer_config": full,
        "attention_k_eq_v": not keys.has_tensor(f"blk.{first_full}.attn_v.weight"),
        "num_kv_shared_layers": shared,
        **_feed_forward(keys, num_layers, shared),
        "rope_parameters": _ropes(keys, full_dim, head_dim),
        "enable_moe_block": num_experts > 0,
        **(_experts(keys) if num_experts else {}),
    }


def _feed_forward(keys: GgufKeys, num_layers: int, num_shared: int) -> Config:
    """Return the size of the feed-forward blocks, which may be twice that in layers that read the keys of others."""
    sizes = keys.per_layer("feed_forward_length", num_layers)
    wide = [sizes[0]] * (num_layers - num_shared) + [2 * sizes[0]] * num_shared
    if sizes not in ([sizes[0]] * num_layers, wide):
        raise keys.metadata.error(f"{keys.architecture}.feed_forward_length", f"{sizes[0]} in all layers, or {wide}")
    return {"intermediate_size": sizes[0], "use_double_wide_mlp": num_shared > 0 and sizes == wide}


def _ropes(keys: GgufKeys, full_dim: int, head_dim: int) -> Config:
    divisors = read_rope_factors(keys, "rope_freqs.weight", full_dim // 2)
    num_rotated = 0 if divisors is None else divisors.count(1.0)
    if divisors is None or any(divisor < _NEVER for divisor in divisors[num_rotated:]):
        raise ModelFormatError(f"{keys.file.path}: rope_freqs.weight must hold ones, and then numbers from {_NEVER:g} on")
    rotated = keys.integer("rope.dimension_count_swa") or head_dim
    if keys.integer("rope.dimension_count") not in (None, full_dim) or rotated != head_dim:
        raise UnsupportedError(
            f"{keys.file.path}: rope.dimension_count must be {full_dim}, rope.dimension_count_swa {head_dim}"
        )
    return {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 2 * num_rotated / full_dim,
            "rope_theta": keys.number("rope.freq_base", 1e6),
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", DEFAULT_ROPE_BASE)},
    }


def _experts(keys: GgufKeys) -> Config:
    return {
        "num_experts": keys.required("expert_count"),
        "top_k_experts": keys.required("expert_used_count"),
        "moe_intermediate_size": keys.required("expert_feed_forward_length"),
    }


GEMMA_READERS: Mapping[str, Callable[[GgufKeys], Config]] = {"gemma3n": _gemma3n, "gemma4": _gemma4}
"""By general.architecture."""
