"""Cohere 2 with a mixture of experts (2026): parallel blocks over one norm; only layers with a window have a rope."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.base.errors import UnsupportedError
from quire.contracts.model_spec import LayerSpec, MlpSpec, ModelSpec, MoeSpec
from quire.model.families import cohere
from quire.model.families.blocks import (
    assemble,
    read_attention,
    read_head_dim,
    read_is_sliding,
    read_layer_norm,
    read_mlp,
    read_rms_norm,
    window_of,
)
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import find_mixture_sources, read_moe, read_shared_expert, read_sparse_layers
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import Sources

MODEL_TYPE = "cohere2_moe"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Cohere 2 mixture."""
    is_rms = config.nullable_number("rms_norm_eps") is not None
    norm = read_rms_norm(config) if is_rms else replace(read_layer_norm(config, has_bias=False), late_cast=True)
    is_sparse, is_sliding = read_sparse_layers(config), _read_is_sliding(config)
    dense, moe = _read_dense(config, is_sparse), _read_moe(config)
    rope = replace(read_rope(config, read_head_dim(config), is_f32=True), is_table_rounded=True)
    full = read_attention(config, rope, has_bias=config.boolean("attention_bias"))
    near, no_rope = replace(full, window=window_of(config, is_sliding) or None), replace(full, rope=None)
    is_rope_forced = config.integer("prefix_dense_sliding_window_pattern") == 1
    layers = [
        LayerSpec(
            near if slides else no_rope if sparse or not is_rope_forced else full,
            moe if sparse else dense,
            attn_in=norm,
            is_parallel=True,
        )
        for slides, sparse in zip(is_sliding, is_sparse, strict=True)
    ]
    return assemble(config, layers, norm, logit_scale=config.number("logit_scale"))


def _read_is_sliding(config: ConfigView) -> list[bool]:
    first = config.integer("first_k_dense_replace", minimum=0)
    prefix, pattern = config.integer("prefix_dense_sliding_window_pattern"), config.integer("sliding_window_pattern")
    return read_is_sliding(
        config, lambda index: (index + 1) % prefix != 0 if index < first else (index - first + 1) % pattern != 0
    )


def _read_dense(config: ConfigView, is_sparse: list[bool]) -> MlpSpec:
    mlp = read_mlp(config)
    return mlp if all(is_sparse) else replace(mlp, intermediate_size=config.integer("prefix_dense_intermediate_size"))


def _read_moe(config: ConfigView) -> MoeSpec:
    moe, scoring = read_moe(config, "intermediate_size"), config.string("expert_selection_fn")
    if scoring not in ("softmax", "sigmoid"):
        raise UnsupportedError(f"expert_selection_fn {scoring!r} is not supported; supported: 'softmax', 'sigmoid'")
    if scoring == "sigmoid":
        is_renormalized = config.boolean("norm_topk_prob")
        moe = replace(moe, scoring="sigmoid", is_renormalized=is_renormalized, is_score_f32=False)
    shared, combination = (
        read_shared_expert(config, moe, "num_shared_experts"),
        config.string("shared_expert_combination_strategy"),
    )
    if combination not in ("sum", "average"):
        allowed = "supported: 'sum', 'average'"
        raise UnsupportedError(f"shared_expert_combination_strategy {combination!r} is not supported; {allowed}")
    return replace(moe, shared=shared, output_scale=0.5 if shared is not None and combination == "average" else 1.0)


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return cohere.find_sources(spec, stored) | find_mixture_sources(spec, stored)


PAGE = FamilyPage(("Cohere2MoeForCausalLM",), read_spec, find_sources)
