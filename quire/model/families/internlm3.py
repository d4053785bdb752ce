"""InternLM 3: Llama with switches of other names: qkv_bias for q, k, v, and bias for o and the feed-forward block."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import llama
from quire.model.families.blocks import read_attention, read_mlp, read_rms_norm, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage

MODEL_TYPE = "internlm3"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an InternLM 3 model."""
    norm, has_bias = read_rms_norm(config), config.boolean("bias", "mlp_bias")
    has_qkv_bias = config.boolean("qkv_bias", "attention_bias")
    attention = replace(read_attention(config), has_qkv_bias=has_qkv_bias, has_o_bias=has_bias)
    mlp = read_mlp(config, has_bias=has_bias)
    return repeat_layer(config, LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm), norm)


PAGE = FamilyPage(("InternLM3ForCausalLM",), read_spec, llama.find_sources)
