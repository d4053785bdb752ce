"""ERNIE 4.5, dense: Llama with adjacent pairs rotated in f32 and one switch for all biases."""

from __future__ import annotations

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import read_attention, read_head_dim, read_mlp, read_rms_norm, repeat_layer
from quire.model.families.cohere import find_sources
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope

MODEL_TYPE = "ernie4_5"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a dense ERNIE 4.5 model."""
    norm, has_bias = read_rms_norm(config), config.boolean("use_bias")
    attention = read_attention(config, read_rope(config, read_head_dim(config), is_f32=True), has_bias)
    return repeat_layer(config, LayerSpec(attention, read_mlp(config, has_bias=has_bias), attn_in=norm, mlp_in=norm), norm)


PAGE = FamilyPage(("Ernie4_5ForCausalLM",), read_spec, find_sources)
