"""Helium (Kyutai): Llama with adjacent pairs rotated and norms that round once."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import read_attention, read_mlp, read_rms_norm, repeat_layer
from quire.model.families.cohere import find_sources
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage

MODEL_TYPE = "helium"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Helium model."""
    norm = read_rms_norm(config, late_cast=True)
    attention = replace(read_attention(config), has_qkv_bias=config.boolean("attention_bias"))
    mlp = read_mlp(config, has_bias=config.boolean("mlp_bias"))
    return repeat_layer(config, LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm), norm)


PAGE = FamilyPage(("HeliumForCausalLM",), read_spec, find_sources)
