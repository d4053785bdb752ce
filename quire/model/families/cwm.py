"""Code World Model: Llama with a window on three of four layers; the first, and each fourth after it, has none."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import llama
from quire.model.families.blocks import assemble, read_attention, read_is_sliding, read_mlp, read_rms_norm, window_of
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage

MODEL_TYPE = "cwm"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a CWM model."""
    norm, mlp, attention = read_rms_norm(config), read_mlp(config, has_bias=config.boolean("mlp_bias")), read_attention(config)
    is_sliding = read_is_sliding(config, lambda index: index % 4 != 0)
    window = window_of(config, is_sliding)
    layers = [
        LayerSpec(replace(attention, window=window if slides else None), mlp, attn_in=norm, mlp_in=norm)
        for slides in is_sliding
    ]
    return assemble(config, layers, norm)


PAGE = FamilyPage(("CwmForCausalLM",), read_spec, llama.find_sources)
