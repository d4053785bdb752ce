"""HyperCLOVA X SEED (Naver, 2025): Granite with norms on the outputs of the blocks; logits_scaling multiplies."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import read_attention, read_mlp, read_rms_norm, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import PRE_NORM_LAYER, Sources, rename

MODEL_TYPE = "hyperclovax"
_LAYER = {**PRE_NORM_LAYER, "attn_out": "post_norm1", "mlp_out": "post_norm2"}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a HyperCLOVA X model."""
    norm, attention = read_rms_norm(config), read_attention(config, has_bias=config.boolean("attention_bias"))
    scale = config.nullable_number("attention_multiplier")
    out = norm if config.boolean("use_post_norm") else None
    layer = LayerSpec(
        attention if scale is None else replace(attention, scale=scale),
        read_mlp(config, has_bias=config.boolean("mlp_bias")),
        *(norm, out, norm, out),
        residual_scale=config.number("residual_multiplier"),
    )
    scales = {"embed_scale": config.number("embedding_multiplier"), "logit_scale": config.number("logits_scaling")}
    return repeat_layer(config, layer, norm, **scales)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return rename(spec, _LAYER)


PAGE = FamilyPage(("HyperCLOVAXForCausalLM",), read_spec, find_sources)
