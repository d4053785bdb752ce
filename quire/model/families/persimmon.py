"""Persimmon (Adept, 2023): GPT-NeoX in sequence, with norms on heads and relu squared."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import gpt_neox
from quire.model.families.blocks import read_attention, read_head_dim, read_layer_norm, read_mlp, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import TOP, Sources

MODEL_TYPE = "persimmon"
_TOP = {**TOP, "final_norm": "final_layernorm"}
_LAYER = {
    **gpt_neox.LAYER,
    "o": "self_attn.dense",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Persimmon model."""
    norm, rope = read_layer_norm(config), read_rope(config, read_head_dim(config), can_be_partial=True)
    attention = replace(read_attention(config, rope, has_bias=True), qk_norm=norm if config.boolean("qk_layernorm") else None)
    attention = replace(attention, num_kv_heads=attention.num_heads)
    mlp = read_mlp(config, has_bias=True, is_gated=False)
    return repeat_layer(config, LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm), norm)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return gpt_neox.find_joined_sources(spec, _LAYER, _TOP, "self_attn")


PAGE = FamilyPage(("PersimmonForCausalLM",), read_spec, find_sources)
