"""BioGPT (Microsoft, 2022): OPT with scaled embeddings, for biomedical text."""

from __future__ import annotations

import math
from collections.abc import Collection

from quire.contracts.model_spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec
from quire.model.families import opt
from quire.model.families.blocks import read_head_dim, read_mlp, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Sources

MODEL_TYPE = "biogpt"
_EPS = 1e-5
"""Of the norms, independent of layer_norm_eps."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a BioGPT model."""
    num_heads, head_dim, norm = (
        config.integer("num_attention_heads"),
        read_head_dim(config),
        NormSpec("layer", _EPS, has_bias=True),
    )
    attention = AttentionSpec(num_heads, num_heads, head_dim, head_dim**-0.5, has_qkv_bias=True, has_o_bias=True)
    layer = LayerSpec(attention, read_mlp(config, has_bias=True, is_gated=False), attn_in=norm, mlp_in=norm)
    positions = config.integer("max_position_embeddings")
    scale = math.sqrt(config.integer("hidden_size")) if config.boolean("scale_embedding") else 1.0
    return repeat_layer(config, layer, norm, num_learned_positions=positions, max_positions=positions, embed_scale=scale)


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return opt.find_sources(spec, stored, final_norm="layer_norm")


PAGE = FamilyPage(("BioGptForCausalLM",), read_spec, find_sources, prefixes=("biogpt.",), head="output_projection")
