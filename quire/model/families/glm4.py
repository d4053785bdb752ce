"""GLM-4-0414: GLM-4 with further norms on the outputs of the blocks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import ModelSpec
from quire.model.families import glm
from quire.model.families.blocks import read_rms_norm, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import PRE_NORM_LAYER, Sources

MODEL_TYPE = "glm4"


_LAYER = PRE_NORM_LAYER | {"attn_out": "post_self_attn_layernorm", "mlp_out": "post_mlp_layernorm"}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a GLM-4-0414 model."""
    norm = read_rms_norm(config)
    return repeat_layer(config, replace(glm.read_layer(config), attn_out=norm, mlp_out=norm), norm)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return glm.find_layers(spec, _LAYER)


PAGE = FamilyPage(("Glm4ForCausalLM",), read_spec, find_sources)
