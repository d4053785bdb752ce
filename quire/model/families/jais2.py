"""Jais 2 (2025): Llama with LayerNorm, and a feed-forward block of relu squared without a gate."""

from __future__ import annotations

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import llama
from quire.model.families.blocks import read_attention, read_layer_norm, read_mlp, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage

MODEL_TYPE = "jais2"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Jais 2 model."""
    norm, attention = read_layer_norm(config), read_attention(config, has_bias=config.boolean("attention_bias"))
    mlp = read_mlp(config, has_bias=config.boolean("mlp_bias"), is_gated=False)
    return repeat_layer(config, LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm), norm)


PAGE = FamilyPage(("Jais2ForCausalLM",), read_spec, llama.find_sources)
