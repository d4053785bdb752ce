"""FlexOlmo (2025): OLMo 2's norms on the outputs of the branches, with OLMoE's mixture."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import assemble, read_attention, read_head_dim, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import find_mixture_sources, read_moe
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import SANDWICH_LAYER, Sources, rename

MODEL_TYPE = "flex_olmo"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a FlexOlmo model."""
    norm = read_rms_norm(config, late_cast=True)
    rope = read_rope(config, read_head_dim(config), is_f32=True)
    attention = read_attention(config, rope, has_bias=config.boolean("attention_bias"))
    moe = replace(read_moe(config, "intermediate_size"), is_renormalized=config.boolean("norm_topk_prob"))
    layer = LayerSpec(replace(attention, qk_norm=norm, qk_norm_over="all"), moe, attn_out=norm, mlp_out=norm)
    return assemble(config, [layer] * config.integer("num_hidden_layers"), norm)


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return rename(spec, SANDWICH_LAYER) | find_mixture_sources(spec, stored)


PAGE = FamilyPage(("FlexOlmoForCausalLM",), read_spec, find_sources)
