"""Arcee AFM: Llama whose feed-forward block is relu squared, without a gate."""

from __future__ import annotations

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import llama
from quire.model.families.blocks import read_attention, read_mlp, read_rms_norm, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage

MODEL_TYPE = "arcee"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an Arcee model."""
    norm = read_rms_norm(config)
    attention = read_attention(config, has_bias=config.boolean("attention_bias"))
    mlp = read_mlp(config, has_bias=config.boolean("mlp_bias"), is_gated=False)
    return repeat_layer(config, LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm), norm)


PAGE = FamilyPage(("ArceeForCausalLM",), read_spec, llama.find_sources)
