"""Ministral (2024): Mistral whose layers have the window by `layer_types`."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import llama
from quire.model.families.blocks import assemble, read_attention, read_is_sliding, read_mlp, read_rms_norm, window_of
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage

MODEL_TYPE = "ministral"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Ministral model."""
    norm, mlp, attention = read_rms_norm(config), read_mlp(config), read_attention(config)
    has_window = config.nullable_integer("sliding_window") is not None
    is_sliding = read_is_sliding(config, lambda _: has_window)
    window = window_of(config, is_sliding)
    layers = [
        LayerSpec(replace(attention, window=window if slides else None), mlp, attn_in=norm, mlp_in=norm)
        for slides in is_sliding
    ]
    return assemble(config, layers, norm)


PAGE = FamilyPage(("MinistralForCausalLM",), read_spec, llama.find_sources)
