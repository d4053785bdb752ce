"""Mistral (Jiang et al., 2023): Llama with a sliding window on every layer. Absent is 4096, null is none."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import llama
from quire.model.families.blocks import assemble, read_attention, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage

MODEL_TYPE = "mistral"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Mistral model."""
    norm = read_rms_norm(config)
    attention = replace(read_attention(config), window=config.nullable_integer("sliding_window"))
    layer = LayerSpec(attention, read_mlp(config), attn_in=norm, mlp_in=norm)
    return assemble(config, [layer] * config.integer("num_hidden_layers"), norm)


PAGE = FamilyPage(("MistralForCausalLM",), read_spec, llama.find_sources)
