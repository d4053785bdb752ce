"""Mamba (Gu and Dao, 2023), Mamba 2 (Dao and Gu, 2024) and Falcon Mamba (TII, 2024): no attention at all, and no positions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.mixer_spec import Mamba1Spec, Mamba2Spec
from quire.contracts.model_spec import NO_ATTENTION, NO_MLP, LayerSpec, ModelSpec, NormSpec
from quire.model.families.blocks import assemble
from quire.model.families.config_view import ConfigView
from quire.model.families.mamba_blocks import (
    MAMBA1_NAMES,
    MAMBA2_NAMES,
    Mamba2Keys,
    mixer_sources,
    read_mamba1,
    read_mamba2,
    read_step_limits,
)
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Sources, rename
from quire.model.parameters import parameter_shapes

MODEL_TYPE = "mamba"
FALCON_MODEL_TYPE = "falcon_mamba"
MAMBA2_MODEL_TYPE = "mamba2"

_TOP = {"embed": "embeddings", "final_norm": "norm_f", "lm_head": "lm_head"}
_MAMBA2_KEYS = Mamba2Keys(
    num_heads=("num_heads",),
    num_groups=("n_groups",),
    state_size=("state_size",),
    conv_size=("conv_kernel",),
    conv_bias=("use_conv_bias",),
    norm_eps="layer_norm_epsilon",
)
_MAX_POSITIONS = 1 << 20
"""Where the file has no limit: the state has none."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Mamba model."""
    return _read(config, read_mamba1(config, "time_step_rank"))


def read_falcon_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Falcon Mamba model, whose steps, B and C are normalised without weights."""
    return _read(config, read_mamba1(config, "time_step_rank", norm_eps=config.number("mixer_rms_eps")))


def read_mamba2_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Mamba 2 model (https://arxiv.org/abs/2405.21060)."""
    min_step, max_step = read_step_limits(config)
    num_heads, head_dim, has_bias = config.integer("num_heads"), config.integer("head_dim"), config.boolean("use_bias")
    channels = int(config.number("expand") * config.integer("hidden_size"))
    if num_heads * head_dim != channels:
        raise config.error("num_heads", num_heads, f"expand * hidden_size ({channels}) / head_dim ({head_dim})")
    mixer = read_mamba2(config, head_dim, _MAMBA2_KEYS)
    return _read(config, replace(mixer, min_step=min_step, max_step=max_step, has_in_bias=has_bias, has_out_bias=has_bias))


def _read(config: ConfigView, mixer: Mamba1Spec | Mamba2Spec) -> ModelSpec:
    norm = NormSpec("rms", config.number("layer_norm_epsilon"))
    layer = LayerSpec(NO_ATTENTION, NO_MLP, attn_in=norm, mixer=mixer)
    max_positions = config.nullable_integer("max_position_embeddings") or _MAX_POSITIONS
    layers = [layer] * config.integer("num_hidden_layers")
    is_residual_f32 = config.boolean("residual_in_fp32")
    return assemble(
        config, layers, norm, has_own_layer_types=True, max_positions=max_positions, is_residual_f32=is_residual_f32
    )


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    names = MAMBA2_NAMES if isinstance(spec.layers[0].mixer, Mamba2Spec) else MAMBA1_NAMES
    return rename(spec, {"attn_in": "norm"}, _TOP) | mixer_sources(spec, parameter_shapes(spec), names, "mixer")


PAGE = FamilyPage(("MambaForCausalLM",), read_spec, find_sources, prefixes=("backbone.",))
FALCON_PAGE = FamilyPage(("FalconMambaForCausalLM",), read_falcon_spec, find_sources, prefixes=("backbone.",))
MAMBA2_PAGE = FamilyPage(("Mamba2ForCausalLM",), read_mamba2_spec, find_sources, prefixes=("backbone.",))
