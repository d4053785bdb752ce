"""What the readers of all architectures of GGUF files share: sizes, the vocabulary, and rotary embeddings. No torch."""

from __future__ import annotations

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.model.gguf_keys import GgufKeys
from quire.model.gguf_rope import DEFAULT_ROPE_BASE, read_rope_scaling

RMS_EPS = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
_UNTIED = ("gpt-oss", "olmo2")
"""Architectures whose files llama.cpp refuses without an output.weight."""
_MAX_EXPERTS = 1 << 18


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
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    scaling = read_rope_scaling(keys, rotated)
    return {**config, "rope_scaling": scaling} if scaling else config


def is_tied(keys: GgufKeys) -> bool:
    """Return whether the head is the embedding: a file of a tied model has no output.weight, as llama.cpp reads it too."""
    return not keys.has_tensor("output.weight") and keys.architecture not in _UNTIED


def num_layers_of(keys: GgufKeys) -> int:
    """Return the number of layers; the numbers of names that follow from metadata are bounded by what is in the file."""
    num_layers, num_experts = keys.required("block_count"), keys.integer("expert_count") or 0
    if num_layers > len(keys.file.tensors) or num_layers * num_experts > _MAX_EXPERTS:
        held = len(keys.file.tensors)
        raise ModelFormatError(f"{keys.file.path}: {num_layers} layers with {num_experts} experts cannot be in {held} tensors")
    return num_layers


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
