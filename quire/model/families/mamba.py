"""Mamba (Gu and Dao, 2023) and Falcon Mamba (TII, 2024): no attention at all, and no positions."""

from __future__ import annotations

from collections.abc import Collection

from quire.contracts.mixer_spec import Mamba1Spec
from quire.contracts.model_spec import NO_ATTENTION, NO_MLP, LayerSpec, ModelSpec, NormSpec
from quire.model.families.blocks import assemble
from quire.model.families.config_view import ConfigView
from quire.model.families.mamba_blocks import MAMBA1_NAMES, mixer_sources, read_mamba1
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Sources, rename
from quire.model.parameters import parameter_shapes

MODEL_TYPE = "mamba"
FALCON_MODEL_TYPE = "falcon_mamba"

_TOP = {"embed": "embeddings", "final_norm": "norm_f", "lm_head": "lm_head"}
_MAX_POSITIONS = 1 << 20
"""Where the file has no limit: the state has none."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Mamba model. Residuals are in the model's dtype, whatever residual_in_fp32 says."""
    return _read(config, read_mamba1(config, "time_step_rank"))


def read_falcon_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Falcon Mamba model, whose steps, B and C are normalised without weights."""
    return _read(config, read_mamba1(config, "time_step_rank", norm_eps=config.number("mixer_rms_eps")))


def _read(config: ConfigView, mixer: Mamba1Spec) -> ModelSpec:
    norm = NormSpec("rms", config.number("layer_norm_epsilon"))
    layer = LayerSpec(NO_ATTENTION, NO_MLP, attn_in=norm, mixer=mixer)
    max_positions = config.nullable_integer("max_position_embeddings") or _MAX_POSITIONS
    layers = [layer] * config.integer("num_hidden_layers")
    return assemble(config, layers, norm, has_own_layer_types=True, max_positions=max_positions)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return rename(spec, {"attn_in": "norm"}, _TOP) | mixer_sources(spec, parameter_shapes(spec), MAMBA1_NAMES, "mixer")


PAGE = FamilyPage(("MambaForCausalLM",), read_spec, find_sources, prefixes=("backbone.",))
FALCON_PAGE = FamilyPage(("FalconMambaForCausalLM",), read_falcon_spec, find_sources, prefixes=("backbone.",))
