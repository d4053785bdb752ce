"""Qwen3: Qwen2 with a norm on each head of q and k instead of their bias. head_dim absent is 128."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import AttentionSpec, ModelSpec
from quire.model.families import llama
from quire.model.families.blocks import read_attention, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.qwen2 import assemble_layers

MODEL_TYPE = "qwen3"


def read_normed_attention(config: ConfigView) -> AttentionSpec:
    """Return attention with a norm over head_dim on q and k."""
    attention = read_attention(config, has_bias=config.boolean("attention_bias"))
    return replace(attention, qk_norm=read_rms_norm(config))


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Qwen3 model."""
    return assemble_layers(config, read_normed_attention(config))


PAGE = FamilyPage(("Qwen3ForCausalLM",), read_spec, llama.find_sources)
