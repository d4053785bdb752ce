"""Shared code of families with multi-head latent attention."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import AttentionSpec, IndexerSpec, LatentSpec, ModelSpec, NormSpec, RopeSpec
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import find_mixture_sources
from quire.model.families.rope_config import read_rope, read_score_scaling
from quire.model.families.sources import PRE_NORM_LAYER, Source, Sources, rename

_LATENT_LAYER = {
    **PRE_NORM_LAYER,
    "q_a": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "kv_b": "self_attn.kv_b_proj",
    "index_q": "self_attn.indexer.wq_b",
    "index_k": "self_attn.indexer.wk",
    "index_k_norm": "self_attn.indexer.k_norm",
    "index_weights": "self_attn.indexer.weights_proj",
}
_NORM_EPS = 1e-6
"""The epsilon of norms of latent rows, independent of rms_norm_eps."""


def read_latent_attention(config: ConfigView, rope: RopeSpec | None = None) -> AttentionSpec:
    """Return multi-head latent attention; rope None: read from the config, of qk_rope_head_dim values."""
    num_heads, has_bias = config.integer("num_attention_heads"), config.boolean("attention_bias")
    rope_dim, nope_dim = config.integer("qk_rope_head_dim", minimum=2), config.integer("qk_nope_head_dim")
    kv_rank = config.integer("kv_lora_rank")
    if config.nullable_integer("num_key_value_heads") not in (None, num_heads):
        given = config.raw("num_key_value_heads")
        raise config.error("num_key_value_heads", given, f"num_attention_heads ({num_heads}) with latent attention")
    value_dim = config.nullable_integer("v_head_dim")
    if value_dim is None:
        value_dim = config.integer("hidden_size") // num_heads
    rope = read_rope(config, rope_dim) if rope is None else rope
    if rope.dim != rope_dim:
        raise config.error("the size that partial_rotary_factor gives", rope.dim, f"qk_rope_head_dim ({rope_dim})")
    norm = NormSpec("rms", _NORM_EPS)
    latent = LatentSpec(config.nullable_integer("q_lora_rank"), kv_rank, nope_dim, rope_dim, value_dim, norm, has_bias)
    return AttentionSpec(
        num_heads,
        num_kv_heads=1,
        head_dim=kv_rank + rope_dim,
        scale=(nope_dim + rope_dim) ** -0.5 * read_score_scaling(config),
        rope=rope,
        has_o_bias=has_bias,
        latent=latent,
    )


def interleaved(attention: AttentionSpec, is_interleaved: bool = True) -> AttentionSpec:
    """Return attention whose rotated pairs are adjacent in the checkpoint's heads."""
    assert attention.latent is not None
    return replace(attention, latent=replace(attention.latent, is_interleaved=is_interleaved))


def read_indexer(
    config: ConfigView, attention: AttentionSpec, *, is_interleaved: bool, is_shared: bool = False
) -> AttentionSpec:
    """Return latent attention to the keys that an indexer chooses; is_shared: that of an earlier layer."""
    assert attention.latent is not None
    head_dim = config.integer("index_head_dim")
    if head_dim < attention.latent.rope_dim or head_dim > attention.head_dim:
        allowed = (
            f"from qk_rope_head_dim ({attention.latent.rope_dim}) to kv_lora_rank + qk_rope_head_dim ({attention.head_dim})"
        )
        raise config.error("index_head_dim", head_dim, allowed)
    indexer = IndexerSpec(
        config.integer("index_n_heads"),
        head_dim,
        config.integer("index_topk"),
        NormSpec("layer", _NORM_EPS, has_bias=True),
        is_interleaved,
        is_shared,
    )
    return replace(attention, latent=replace(attention.latent, indexer=indexer))


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    sources = rename(spec, _LATENT_LAYER) | find_mixture_sources(spec, stored)
    for index, layer in enumerate(spec.layers):
        latent = layer.attention.latent
        if latent is not None and latent.q_rank is not None:
            # What makes queries of their latent rows.
            sources[f"layers.{index}.q.weight"] = Source.of(f"layers.{index}.self_attn.q_b_proj.weight")
    return sources
