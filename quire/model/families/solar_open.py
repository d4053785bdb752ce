"""Solar Open (Upstage, 2025): DeepSeek-V3's mixture in every layer, with plain grouped-query attention."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import qwen3_moe
from quire.model.families.blocks import assemble, read_attention, read_head_dim, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import read_sigmoid_moe
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope

MODEL_TYPE = "solar_open"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Solar Open model."""
    norm = read_rms_norm(config)
    rope = read_rope(config, read_head_dim(config), can_be_partial=True)
    attention = replace(read_attention(config, rope), has_qkv_bias=config.boolean("attention_bias"))
    layer = LayerSpec(attention, read_sigmoid_moe(config), attn_in=norm, mlp_in=norm)
    return assemble(config, [layer] * config.integer("num_hidden_layers"), norm)


PAGE = FamilyPage(("SolarOpenForCausalLM",), read_spec, qwen3_moe.find_sources)
