"""MiniCPM3 (2024): multi-head latent attention in a dense model, with scales of embeddings, branches and logits."""

from __future__ import annotations

import math

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import assemble, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.latent import find_sources, read_latent_attention
from quire.model.families.page import FamilyPage

MODEL_TYPE = "minicpm3"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a MiniCPM3 model."""
    norm, num_layers, hidden_size = read_rms_norm(config), config.integer("num_hidden_layers"), config.integer("hidden_size")
    depth, base = config.nullable_number("scale_depth"), config.nullable_integer("dim_model_base")
    mlp = read_mlp(config, has_bias=config.boolean("mlp_bias"))
    layer = LayerSpec(
        read_latent_attention(config),
        mlp,
        attn_in=norm,
        mlp_in=norm,
        residual_scale=1.0 if depth is None else depth / math.sqrt(num_layers),
    )
    return assemble(
        config,
        [layer] * num_layers,
        norm,
        embed_scale=config.number("scale_emb"),
        is_embed_scale_cast=True,
        logit_scale=1.0 if base is None else base / hidden_size,
    )


PAGE = FamilyPage(("MiniCPM3ForCausalLM",), read_spec, find_sources)
