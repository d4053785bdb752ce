"""Cohere Command R: parallel blocks over one LayerNorm without bias, adjacent pairs rotated, scaled logits, a tied head."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import read_attention, read_head_dim, read_layer_norm, read_mlp, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import PRE_NORM_LAYER, Sources, pair_halves, rename

MODEL_TYPE = "cohere"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Cohere model."""
    norm = replace(read_layer_norm(config, has_bias=False), late_cast=True)
    rope = replace(read_rope(config, read_head_dim(config), is_f32=True), is_table_rounded=True)
    attention = read_attention(config, rope, has_bias=config.boolean("attention_bias"))
    if config.boolean("use_qk_norm"):
        attention = replace(attention, qk_norm=norm, qk_norm_over="each")
    layer = LayerSpec(attention, read_mlp(config), attn_in=norm, is_parallel=True)
    return repeat_layer(config, layer, norm, logit_scale=config.number("logit_scale"))


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return pair_halves(spec, rename(spec, PRE_NORM_LAYER))


PAGE = FamilyPage(("CohereForCausalLM",), read_spec, find_sources)
