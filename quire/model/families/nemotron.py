"""Nemotron 3 and 4, Minitron: LayerNorm that stores weight - 1, half of each head rotated, relu squared without a gate."""

from __future__ import annotations

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import llama
from quire.model.families.blocks import read_attention, read_head_dim, read_layer_norm, read_mlp, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope

MODEL_TYPE = "nemotron"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Nemotron model."""
    norm = read_layer_norm(config, "norm_eps", offset=1)
    rope = read_rope(config, read_head_dim(config), can_be_partial=True)
    attention = read_attention(config, rope, has_bias=config.boolean("attention_bias"))
    mlp = read_mlp(config, has_bias=config.boolean("mlp_bias"), is_gated=False)
    return repeat_layer(config, LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm), norm)


PAGE = FamilyPage(("NemotronForCausalLM",), read_spec, llama.find_sources)
