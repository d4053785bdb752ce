"""StarCoder 2: LayerNorm, biases everywhere, a feed-forward block of GELU without a gate."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import read_attention, read_layer_norm, read_mlp, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import PRE_NORM_LAYER, Sources, rename

MODEL_TYPE = "starcoder2"


_LAYER = PRE_NORM_LAYER | {"up": "mlp.c_fc", "down": "mlp.c_proj"}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a StarCoder 2 model."""
    norm, has_bias = read_layer_norm(config, "norm_epsilon"), config.boolean("use_bias")
    attention = replace(read_attention(config, has_bias=has_bias), window=config.nullable_integer("sliding_window"))
    mlp = read_mlp(config, has_bias=has_bias, is_gated=False)
    return repeat_layer(config, LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm), norm)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return rename(spec, _LAYER)


PAGE = FamilyPage(("Starcoder2ForCausalLM",), read_spec, find_sources)
