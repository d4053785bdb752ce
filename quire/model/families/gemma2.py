"""Gemma 2: Gemma with norms before and after each branch, capped scores and logits, and a window on every other layer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import assemble, read_attention, read_is_sliding, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import SANDWICH_LAYER, Sources, rename

MODEL_TYPE = "gemma2"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Gemma 2 model."""
    norm = read_rms_norm(config, offset=1, late_cast=True)
    mlp = read_mlp(config, "hidden_activation")
    window = config.nullable_integer("sliding_window")
    attention = replace(
        read_attention(config, has_bias=config.boolean("attention_bias")),
        scale=config.number("query_pre_attn_scalar") ** -0.5,
        softcap=config.nullable_number("attn_logit_softcapping"),
    )
    is_sliding = read_is_sliding(config, lambda index: index % 2 == 0)
    if any(is_sliding) and window is None:
        raise config.error("sliding_window", None, "an integer >= 1, as some layers have a window")
    layers = [
        LayerSpec(replace(attention, window=window if slides else None), mlp, norm, norm, norm, norm) for slides in is_sliding
    ]
    return assemble(
        config,
        layers,
        norm,
        embed_scale=config.integer("hidden_size") ** 0.5,
        is_embed_scale_cast=True,
        final_softcap=config.nullable_number("final_logit_softcapping"),
    )


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return rename(spec, SANDWICH_LAYER)


PAGE = FamilyPage(("Gemma2ForCausalLM",), read_spec, find_sources)
