"""Hunyuan, dense: Llama with norms on heads of q and k after their rotation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import read_attention, read_mlp, read_rms_norm, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import PRE_NORM_LAYER, Sources, rename

MODEL_TYPE = "hunyuan_v1_dense"


_LAYER = PRE_NORM_LAYER | {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a dense Hunyuan model."""
    norm = read_rms_norm(config)
    attention = read_attention(config, has_bias=config.boolean("attention_bias"))
    attention = replace(attention, qk_norm=norm, is_qk_norm_last=True)
    return repeat_layer(config, LayerSpec(attention, read_mlp(config), attn_in=norm, mlp_in=norm), norm)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return rename(spec, _LAYER)


PAGE = FamilyPage(("HunYuanDenseV1ForCausalLM",), read_spec, find_sources)
