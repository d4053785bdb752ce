"""Llama (Touvron et al., 2023) and its many relatives: pre-norm, rotary, grouped queries, SwiGLU."""

from __future__ import annotations

from collections.abc import Collection

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import assemble, read_attention, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import PRE_NORM_LAYER, Sources, rename

MODEL_TYPE = "llama"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Llama model."""
    norm = read_rms_norm(config)
    attention = read_attention(config, has_bias=config.boolean("attention_bias"))
    mlp = read_mlp(config, has_bias=config.boolean("mlp_bias"))
    layer = LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm)
    return assemble(config, [layer] * config.integer("num_hidden_layers"), norm)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return rename(spec, PRE_NORM_LAYER)


PAGE = FamilyPage(("LlamaForCausalLM",), read_spec, find_sources)
