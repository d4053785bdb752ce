"""What the readers of all architectures of GGUF files share: sizes, the vocabulary, and rotary embeddings. No torch."""

from __future__ import annotations

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.model.gguf_keys import GgufKeys
from quire.model.gguf_rope import DEFAULT_ROPE_BASE, read_rope_scaling

RMS_EPS = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
_UNTIED = ("exaone-moe", "gpt-oss", "kimi-linear", "olmo2", "phimoe")
"""Architectures whose files llama.cpp refuses without an output.weight."""
_MAX_EXPERTS = 1 << 18
SOFTMAX, SIGMOID = 1, 2
"""What expert_gating_func may say."""


def read_common(
    keys: GgufKeys,
    eps: tuple[str, str] = RMS_EPS,
    *,
    can_be_partial: bool = False,
    num_kv_heads: int | None = None,
    inner_size: int | None = None,
) -> dict[str, object]:
    """Return what all architectures but GPT-2 share.

    eps             the key of the eps of norms in a config.json, and in the file
    can_be_partial  only a part of each head may be rotated
    num_kv_heads, inner_size  where the file has a number for each layer; None: it has one for all
    """
    hidden_size, num_heads = keys.required("embedding_length"), keys.required("attention.head_count")
    head_dim = keys.integer("attention.key_length")
    if head_dim is None:
        if hidden_size % num_heads:
            raise keys.metadata.error(f"{keys.architecture}.embedding_length", f"a multiple of {num_heads} heads")
        head_dim = hidden_size // num_heads
    if keys.integer("attention.value_length") not in (None, head_dim):
        raise UnsupportedError(f"{keys.file.path}: attention.value_length must be attention.key_length ({head_dim})")
    rotated = keys.integer("rope.dimension_count") or head_dim
    if rotated != head_dim and not can_be_partial:
        raise UnsupportedError(f"{keys.file.path}: rope.dimension_count {rotated} must be the size of a head ({head_dim})")
    config: dict[str, object] = {
        "vocab_size": vocab_size_of(keys, hidden_size),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers_of(keys),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads or keys.integer("attention.head_count_kv") or num_heads,
        "head_dim": head_dim,
        "intermediate_size": inner_size or keys.required("feed_forward_length"),
        eps[0]: keys.number(eps[1]),
        "max_position_embeddings": keys.required("context_length"),
        "rope_theta": keys.number("rope.freq_base", DEFAULT_ROPE_BASE),
        "tie_word_embeddings": is_tied(keys),
    }
    if can_be_partial:  # also where it is 1, as that is not the default of all families
        config["partial_rotary_factor"] = rotated / head_dim
    scaling = read_rope_scaling(keys, rotated)
    return {**config, "rope_scaling": scaling} if scaling else config


def is_tied(keys: GgufKeys) -> bool:
    """Return whether the head is the embedding: a file of a tied model has no output.weight, as llama.cpp reads it too."""
    return not keys.has_tensor("output.weight") and keys.architecture not in _UNTIED


def num_layers_of(keys: GgufKeys) -> int:
    """Return the number of layers, without the last ones, where those only draft (`nextn_predict_layers`).

    The numbers of names that follow from metadata are bounded by what is in the file.
    """
    num_layers, num_experts = keys.required("block_count"), keys.integer("expert_count") or 0
    num_drafting = keys.integer("nextn_predict_layers") or 0
    if num_drafting >= num_layers:
        raise keys.metadata.error(f"{keys.architecture}.nextn_predict_layers", f"below block_count ({num_layers})")
    num_layers -= num_drafting
    if num_layers > len(keys.file.tensors) or num_layers * num_experts > _MAX_EXPERTS:
        held = len(keys.file.tensors)
        raise ModelFormatError(f"{keys.file.path}: {num_layers} layers with {num_experts} experts cannot be in {held} tensors")
    return num_layers


def has_bias(keys: GgufKeys, module: str) -> bool:
    """Return whether the first layer has a bias; module: its name in the layer.

    That of q may be joined with those of k and v.
    """
    return keys.has_tensor(f"blk.0.{module}.bias") or (module == "attn_q" and keys.has_tensor("blk.0.attn_qkv.bias"))


def read_gating(keys: GgufKeys, default: int, *supported: int) -> int:
    """Return which function makes scores of experts: SOFTMAX or SIGMOID. Raises UnsupportedError for another one."""
    found = keys.integer("expert_gating_func") or default
    if found not in supported:
        names = " or ".join(map(str, supported))
        raise UnsupportedError(f"{keys.file.path}: expert_gating_func {found} is not supported; supported: {names}")
    return found


def read_deepseek_experts(keys: GgufKeys) -> dict[str, object]:
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


def read_window_pattern(keys: GgufKeys, period: int) -> dict[str, object]:
    """Return which layers have a window: those that the file names, or all but each so many-th."""
    slides = keys.flags("attention.sliding_window_pattern")
    if slides is None:
        return {"sliding_window_pattern": keys.integer("attention.sliding_window_pattern") or period}
    return {"layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides]}


def vocab_size_of(keys: GgufKeys, hidden_size: int) -> int:
    embedding = keys.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden_size:
        shape = None if embedding is None else list(embedding.shape)
        raise ModelFormatError(f"{keys.file.path}: token_embd.weight must have rows of {hidden_size} elements, got {shape}")
    num_rows = embedding.shape[0]
    tokens = keys.metadata.strings("tokenizer.ggml.tokens")
    for noun, count in (("vocab_size", keys.integer("vocab_size")), ("tokens", None if tokens is None else len(tokens))):
        if count is not None and count != num_rows:
            raise ModelFormatError(f"{keys.file.path}: {noun} is {count}, but token_embd.weight has {num_rows} rows")
    return num_rows
