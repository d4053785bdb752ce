"""OLMo (2024): Llama whose LayerNorms have neither weight nor bias; q, k and v may be clipped."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec, NormSpec
from quire.model.families import llama
from quire.model.families.blocks import read_attention, read_head_dim, read_mlp, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope

_EPS = 1e-5

MODEL_TYPE = "olmo"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an OLMo model."""
    norm = NormSpec("layer", _EPS, has_weight=False)
    attention = read_attention(config, read_rope(config, read_head_dim(config), is_f32=True), config.boolean("attention_bias"))
    attention = replace(attention, clip_qkv=config.nullable_number("clip_qkv"))
    return repeat_layer(config, LayerSpec(attention, read_mlp(config), attn_in=norm, mlp_in=norm), norm)


PAGE = FamilyPage(("OlmoForCausalLM",), read_spec, llama.find_sources)
