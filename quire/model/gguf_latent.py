"""The metadata of GGUF files of models with multi-head latent attention as the config.json of their families. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.model.gguf_common import (
    RMS_EPS,
    SIGMOID,
    SOFTMAX,
    is_tied,
    num_layers_of,
    read_deepseek_experts,
    read_gating,
    vocab_size_of,
)
from quire.model.gguf_keys import GgufKeys
from quire.model.gguf_rope import DEFAULT_ROPE_BASE, read_rope_scaling

Config = dict[str, object]
_MINICPM3: Config = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
"""What its files do not say, as in the released model."""
_BETA_OF_MISTRAL4 = 0.1
"""Of the scaling of queries by position in the released model, which files made from its Hugging Face checkpoint do not say."""
_SHARED_INDEXERS_FROM = 1 << 20
"""Files of GLM-5 with so many positions that do not say which layers have an indexer are of releases where some share one."""


def read_latent(keys: GgufKeys) -> Config:
    """Return what all share but for the rotation; sizes of heads are those of the files before or with MLA."""
    hidden_size, num_heads = keys.required("embedding_length"), keys.required("attention.head_count")
    kv_rank, rope_dim = keys.required("attention.kv_lora_rank"), keys.required("rope.dimension_count")
    plain, with_mla = keys.integer("attention.key_length"), keys.integer("attention.key_length_mla")
    plain_value, with_mla_value = keys.integer("attention.value_length"), keys.integer("attention.value_length_mla")
    head_dim, value_dim = with_mla or plain, with_mla_value or plain_value or _stored_value_dim(keys, num_heads)
    if not head_dim or not value_dim or head_dim <= rope_dim:
        raise keys.metadata.error(f"{keys.architecture}.attention.key_length", f"an integer above {rope_dim}")
    keys.sections("attention.head_count_kv")
    return {
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
        "tie_word_embeddings": is_tied(keys),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _stored_value_dim(keys: GgufKeys, num_heads: int) -> int | None:
    """Return the size of a value, of files that do not say it: outputs of all heads are the columns of what follows."""
    tensor = keys.file.tensors.get("blk.0.attn_output.weight")
    if tensor is None or len(tensor.shape) != 2 or tensor.shape[1] % num_heads:
        raise ModelFormatError(f"{keys.file.path}: blk.0.attn_output.weight must have a multiple of {num_heads} columns")
    return tensor.shape[1] // num_heads


def _rotated(keys: GgufKeys, config: Config) -> Config:
    """Return a config with its rotation; files have a tenth of the multiplier of the logarithm."""
    scaling = read_rope_scaling(keys, cast("int", config["qk_rope_head_dim"]))
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    if scaling and multiplier:
        scaling |= {"mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}
    config = {**config, "rope_theta": keys.number("rope.freq_base", DEFAULT_ROPE_BASE)}
    return {**config, "rope_scaling": scaling} if scaling else config


def _deepseek2(keys: GgufKeys) -> Config:
    """Read DeepSeek V2 (softmax) or V3, R1, Kimi K2 and GLM-4.7-Flash (sigmoid); without experts Youtu-LLM."""
    config = _rotated(keys, read_latent(keys))
    if not keys.integer("expert_count"):
        for name in ("expert_shared_count", "leading_dense_block_count"):
            keys.raw(name)
        return {**config, "model_type": "youtu", "rope_interleave": True}
    config |= read_deepseek_experts(keys)
    if read_gating(keys, SOFTMAX, SOFTMAX, SIGMOID) == SIGMOID:
        return {**config, "rope_interleave": True}
    method = "group_limited_greedy" if cast("int", config["n_group"]) > 1 else "greedy"
    return {**config, "model_type": "deepseek_v2", "topk_method": method}


def _indexed(keys: GgufKeys) -> Config:
    """Read DeepSeek V3.2, or GLM-5, of whose layers some may share an indexer."""
    read_gating(keys, SIGMOID, SIGMOID)
    config = {**_rotated(keys, read_latent(keys)), **read_deepseek_experts(keys)}
    types = keys.flags("attention.indexer.types")
    if types is None and keys.architecture == "glm-dsa":
        types = _stored_indexers(keys, num_layers_of(keys))
    return {
        **config,
        "index_n_heads": keys.required("attention.indexer.head_count"),
        "index_head_dim": keys.required("attention.indexer.key_length"),
        "index_topk": keys.required("attention.indexer.top_k"),
        **({} if types is None else {"indexer_types": ["full" if has_own else "shared" for has_own in types]}),
    }


def _stored_indexers(keys: GgufKeys, num_layers: int) -> list[bool]:
    """Return which layers have an indexer of their own, by the tensors of a file that does not say it. Raises ModelFormatError
    where all have one stored in a release whose layers do not all use it."""
    found = [f"blk.{index}.indexer.attn_q_b.weight" in keys.file.tensors for index in range(num_layers)]
    num_positions = keys.required("context_length")
    if all(found) and num_positions >= _SHARED_INDEXERS_FROM:
        raise ModelFormatError(
            f"{keys.file.path}: glm-dsa.attention.indexer.types is missing: for {num_positions} positions it must say for each "
            f"of the {num_layers} layers true (an indexer of its own) or false (that of an earlier layer); all have its tensors"
        )
    return found


def _mistral4(keys: GgufKeys) -> Config:
    read_gating(keys, SOFTMAX, SOFTMAX)
    config = {**_rotated(keys, read_latent(keys)), **read_deepseek_experts(keys), "rope_interleave": True}
    if scaling := cast("Config", config.get("rope_scaling", {})):
        original = scaling["original_max_position_embeddings"]
        if keys.integer("attention.temperature_length") not in (None, 0, original):
            raise UnsupportedError(
                f"{keys.file.path}: attention.temperature_length must be rope.scaling.original_context_length ({original})"
            )
        scaling["llama_4_scaling_beta"] = keys.number("attention.temperature_scale", _BETA_OF_MISTRAL4)
    return config


def _minicpm3(keys: GgufKeys) -> Config:
    return {**_rotated(keys, read_latent(keys)), **_MINICPM3}


LATENT_READERS: Mapping[str, Callable[[GgufKeys], Config]] = {
    "deepseek2": _deepseek2,
    "deepseek32": _indexed,
    "glm-dsa": _indexed,
    "minicpm3": _minicpm3,
    "mistral4": _mistral4,
}
"""By general.architecture."""
