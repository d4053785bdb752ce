"""Bamba (IBM, 2024): Mamba 2, and attention in some layers, half of whose heads is rotated."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.mixer_spec import Mamba2Spec
from quire.contracts.model_spec import NO_ATTENTION, LayerSpec, ModelSpec
from quire.model.families.blocks import assemble, read_attention, read_head_dim, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.mamba_blocks import (
    MAMBA2_NAMES,
    mixer_sources,
    read_mamba2,
    read_mamba2_head_dim,
    read_step_limits,
)
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import PRE_NORM_LAYER, TOP, Sources, rename
from quire.model.parameters import parameter_shapes

MODEL_TYPE = "bamba"

LAYER = {
    **PRE_NORM_LAYER,
    "mlp_in": "pre_ff_layernorm",
    "gate": "feed_forward.gate_proj",
    "up": "feed_forward.up_proj",
    "down": "feed_forward.down_proj",
}
TOP_NAMES = {**TOP, "final_norm": "final_layernorm"}


def read_expanded_mixer(config: ConfigView) -> Mamba2Spec:
    """Return a mixer of `mamba_expand` times the hidden size, with biases by `mamba_proj_bias`."""
    channels = int(config.number("mamba_expand") * config.integer("hidden_size"))
    min_step, max_step = read_step_limits(config)
    has_bias = config.boolean("mamba_proj_bias")
    mixer = read_mamba2(config, read_mamba2_head_dim(config, channels))
    return replace(mixer, min_step=min_step, max_step=max_step, has_in_bias=has_bias, has_out_bias=has_bias)


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Bamba model."""
    norm, num_layers = read_rms_norm(config), config.integer("num_hidden_layers")
    rope = read_rope(config, read_head_dim(config), can_be_partial=True)
    attention = read_attention(config, rope, config.boolean("attention_bias"))
    mlp, mixer = read_mlp(config, has_bias=config.boolean("mlp_bias")), read_expanded_mixer(config)
    attended = config.integers("attn_layer_indices")
    if any(index >= num_layers for index in attended):
        raise config.error("attn_layer_indices", attended, f"integers below num_hidden_layers ({num_layers})")
    layers = [
        LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm)
        if index in attended
        else LayerSpec(NO_ATTENTION, mlp, attn_in=norm, mlp_in=norm, mixer=mixer)
        for index in range(num_layers)
    ]
    return assemble(config, layers, norm, has_own_layer_types=True)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return rename(spec, LAYER, TOP_NAMES) | mixer_sources(spec, parameter_shapes(spec), MAMBA2_NAMES, "mamba")


PAGE = FamilyPage(("BambaForCausalLM",), read_spec, find_sources)
