"""Cohere Command R7B and A: Cohere with a window on three of four layers, which alone have a rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import cohere
from quire.model.families.blocks import (
    assemble,
    read_attention,
    read_head_dim,
    read_is_sliding,
    read_layer_norm,
    read_mlp,
    window_of,
)
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope

MODEL_TYPE = "cohere2"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Cohere 2 model."""
    norm, mlp = replace(read_layer_norm(config, has_bias=False), late_cast=True), read_mlp(config)
    rope = replace(read_rope(config, read_head_dim(config), is_f32=True), is_table_rounded=True)
    attention = read_attention(config, rope, has_bias=config.boolean("attention_bias"))
    pattern = config.integer("sliding_window_pattern")
    is_sliding = read_is_sliding(config, lambda index: (index + 1) % pattern != 0)
    window = window_of(config, is_sliding)
    near, full = replace(attention, window=window or None), replace(attention, rope=None)
    layers = [LayerSpec(near if slides else full, mlp, attn_in=norm, is_parallel=True) for slides in is_sliding]
    return assemble(config, layers, norm, logit_scale=config.number("logit_scale"))


PAGE = FamilyPage(("Cohere2ForCausalLM",), read_spec, cohere.find_sources)
