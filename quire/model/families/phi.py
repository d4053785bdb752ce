"""Phi-1, 1.5 and 2: parallel blocks over one LayerNorm, half of each head rotated, biases everywhere, logits included."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import read_attention, read_head_dim, read_layer_norm, read_mlp, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import PRE_NORM_LAYER, TOP, Sources, rename

MODEL_TYPE = "phi"


_TOP = TOP | {"final_norm": "final_layernorm"}
_LAYER = PRE_NORM_LAYER | {
    "o": "self_attn.dense",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Phi-2 model."""
    norm = read_layer_norm(config)
    rope = read_rope(config, read_head_dim(config), can_be_partial=True)
    attention = read_attention(config, rope, has_bias=True)
    if config.boolean("qk_layernorm"):
        attention = replace(attention, qk_norm=norm)
    mlp = read_mlp(config, has_bias=True, is_gated=False)
    return repeat_layer(config, LayerSpec(attention, mlp, attn_in=norm, is_parallel=True), norm, has_head_bias=True)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return rename(spec, _LAYER, _TOP)


PAGE = FamilyPage(("PhiForCausalLM",), read_spec, find_sources)
