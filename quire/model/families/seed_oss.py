"""Seed-OSS: Llama with separate switches for the biases of q, k, v and of o."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import llama
from quire.model.families.blocks import read_attention, read_mlp, read_rms_norm, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage

MODEL_TYPE = "seed_oss"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Seed-OSS model."""
    norm = read_rms_norm(config)
    attention = replace(
        read_attention(config),
        has_qkv_bias=config.boolean("attention_bias"),
        has_o_bias=config.boolean("attention_out_bias"),
    )
    mlp = read_mlp(config, has_bias=config.boolean("mlp_bias"))
    return repeat_layer(config, LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm), norm)


PAGE = FamilyPage(("SeedOssForCausalLM",), read_spec, llama.find_sources)
