"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v; a window, where it is switched on, from max_window_layers on."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import AttentionSpec, LayerSpec, ModelSpec
from quire.model.families import llama
from quire.model.families.blocks import assemble, read_attention, read_is_sliding, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage

MODEL_TYPE = "qwen2"


def read_window(config: ConfigView) -> int | None:
    """Return the window of the layers that have one; Qwen configs name one even where it is switched off."""
    window = config.nullable_integer("sliding_window")
    return window if config.boolean("use_sliding_window") else None


def assemble_layers(config: ConfigView, attention: AttentionSpec) -> ModelSpec:
    """Return the spec of a dense Qwen model: `attention` in every layer, with a window in the later ones."""
    norm, mlp, window = read_rms_norm(config), read_mlp(config), read_window(config)
    first = config.integer("max_window_layers", minimum=0)
    is_sliding = read_is_sliding(config, lambda index: window is not None and index >= first)
    if any(is_sliding) and window is None:
        raise config.error("layer_types", "sliding_attention", "full_attention where use_sliding_window is false")
    layers = [
        LayerSpec(replace(attention, window=window if slides else None), mlp, attn_in=norm, mlp_in=norm)
        for slides in is_sliding
    ]
    return assemble(config, layers, norm)


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Qwen2 model."""
    return assemble_layers(config, replace(read_attention(config), has_qkv_bias=True))


PAGE = FamilyPage(("Qwen2ForCausalLM",), read_spec, llama.find_sources)
