"""Granite (IBM): Llama with four multipliers. attention_multiplier absent is 1.0, not head_dim ** -0.5."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, MlpSpec, ModelSpec, MoeSpec
from quire.model.families import llama
from quire.model.families.blocks import assemble, read_attention, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage

MODEL_TYPE = "granite"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Granite model."""
    return assemble_scaled(config, [read_layer(config)] * config.integer("num_hidden_layers"))


def read_layer(config: ConfigView, mlp: MlpSpec | MoeSpec | None = None) -> LayerSpec:
    """Return a layer with this feed-forward block; None: the dense one of the config."""
    norm = read_rms_norm(config)
    attention = read_attention(config, has_bias=config.boolean("attention_bias"))
    return LayerSpec(
        replace(attention, scale=config.number("attention_multiplier")),
        read_mlp(config, has_bias=config.boolean("mlp_bias")) if mlp is None else mlp,
        attn_in=norm,
        mlp_in=norm,
        residual_scale=config.number("residual_multiplier"),
    )


def assemble_scaled(config: ConfigView, layers: Iterable[LayerSpec]) -> ModelSpec:
    """Return the spec of a model with these layers, and the scales of embeddings and logits."""
    return assemble(
        config,
        layers,
        read_rms_norm(config),
        embed_scale=config.number("embedding_multiplier"),
        logit_scale=1 / config.number("logits_scaling"),
    )


PAGE = FamilyPage(("GraniteForCausalLM",), read_spec, llama.find_sources)
