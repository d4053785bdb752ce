"""Hunyuan 3 (Tencent, 2026): norms on heads, a sigmoid mixture with a correction and a shared expert, dense first layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import assemble, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import (
    LEAST_SUM,
    MixtureNames,
    find_mixture_sources,
    read_moe,
    read_shared_expert,
    read_sparse_layers,
)
from quire.model.families.page import FamilyPage
from quire.model.families.qwen3 import read_normed_attention
from quire.model.families.sources import PRE_NORM_LAYER, Sources, rename

MODEL_TYPE = "hy_v3"
_CORRECTIONS = ("expert_bias", "e_score_correction_bias")
_HUB = MixtureNames(router="router.gate.weight", correction=_CORRECTIONS, shared="shared_mlp")
_LIBRARY = MixtureNames(correction=_CORRECTIONS)


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Hunyuan 3 model."""
    norm, attention, has_bias = read_rms_norm(config), read_normed_attention(config), config.boolean("mlp_bias")
    dense, moe = read_mlp(config, has_bias=has_bias), read_moe(config, "moe_intermediate_size")
    shared = read_shared_expert(config, moe, "num_shared_experts")
    moe = replace(
        moe,
        scoring="sigmoid",
        has_correction=True,
        is_weight_f32=True,
        is_router_f32=True,
        least_sum=LEAST_SUM,
        routed_scale=config.number("router_scaling_factor"),
        shared=None if shared is None else replace(shared, has_bias=has_bias),
    )
    layers = [
        LayerSpec(attention, moe if is_sparse else dense, attn_in=norm, mlp_in=norm) for is_sparse in read_sparse_layers(config)
    ]
    return assemble(config, layers, norm)


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored: mixtures under the names of their authors, or those of transformers."""
    names = _HUB if any(name.endswith("mlp.router.gate.weight") for name in stored) else _LIBRARY
    return rename(spec, PRE_NORM_LAYER) | find_mixture_sources(spec, stored, names)


PAGE = FamilyPage(("HYV3ForCausalLM",), read_spec, find_sources)
