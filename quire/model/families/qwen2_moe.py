"""Qwen2 mixture of experts: a bias on q, k and v, and a shared expert with a gate of its own. Windows stand on even layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import assemble, read_attention, read_is_sliding, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import MixtureNames, find_mixture_sources, read_moe, read_sparse_steps
from quire.model.families.page import FamilyPage
from quire.model.families.sources import PRE_NORM_LAYER, Sources, rename

MODEL_TYPE = "qwen2_moe"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Qwen2-MoE model."""
    norm, dense = read_rms_norm(config), read_mlp(config)
    attention = replace(read_attention(config), has_qkv_bias=config.boolean("qkv_bias"))
    moe = read_moe(config, "moe_intermediate_size")
    shared = replace(moe.expert, intermediate_size=config.integer("shared_expert_intermediate_size"))
    moe = replace(moe, is_renormalized=config.boolean("norm_topk_prob"), shared=shared, has_shared_gate=True)
    has_windows, last = config.boolean("use_sliding_window"), config.integer("max_window_layers", minimum=0)
    window = config.nullable_integer("sliding_window") if has_windows else None
    is_sliding = read_is_sliding(config, lambda index: window is not None and index % 2 == 0 and index < last)
    if any(is_sliding) and window is None:
        raise config.error("layer_types", "sliding_attention", "full_attention where use_sliding_window is false")
    layers = [
        LayerSpec(replace(attention, window=window if slides else None), moe if is_sparse else dense, attn_in=norm, mlp_in=norm)
        for slides, is_sparse in zip(is_sliding, read_sparse_steps(config), strict=True)
    ]
    return assemble(config, layers, norm)


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return rename(spec, PRE_NORM_LAYER) | find_mixture_sources(spec, stored, MixtureNames(shared="shared_expert"))


PAGE = FamilyPage(("Qwen2MoeForCausalLM",), read_spec, find_sources)
