"""Qwen3 mixture of experts. head_dim absent is hidden_size / num_attention_heads, unlike in the dense Qwen3."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import assemble, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import find_mixture_sources, read_moe, read_sparse_steps
from quire.model.families.page import FamilyPage
from quire.model.families.qwen2 import read_window
from quire.model.families.qwen3 import read_normed_attention
from quire.model.families.sources import PRE_NORM_LAYER, Sources, rename

MODEL_TYPE = "qwen3_moe"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Qwen3-MoE model."""
    norm, dense = read_rms_norm(config), read_mlp(config)
    attention = replace(read_normed_attention(config), window=read_window(config))
    moe = replace(read_moe(config, "moe_intermediate_size"), is_renormalized=config.boolean("norm_topk_prob"))
    layers = [
        LayerSpec(attention, moe if is_sparse else dense, attn_in=norm, mlp_in=norm) for is_sparse in read_sparse_steps(config)
    ]
    return assemble(config, layers, norm)


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return rename(spec, PRE_NORM_LAYER) | find_mixture_sources(spec, stored)


PAGE = FamilyPage(("Qwen3MoeForCausalLM",), read_spec, find_sources)
