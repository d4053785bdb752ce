"""Ministral 3: Mistral with YaRN, and queries that are scaled by their position as in Llama 4."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import llama
from quire.model.families.blocks import read_attention, read_mlp, read_rms_norm, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_query_scaling

MODEL_TYPE = "ministral3"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Ministral 3 model."""
    norm = read_rms_norm(config)
    attention = replace(
        read_attention(config),
        window=config.nullable_integer("sliding_window"),
        query_scaling=read_query_scaling(config),
    )
    return repeat_layer(config, LayerSpec(attention, read_mlp(config), attn_in=norm, mlp_in=norm), norm)


PAGE = FamilyPage(("Ministral3ForCausalLM",), read_spec, llama.find_sources)
