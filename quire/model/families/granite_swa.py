"""Granite with windows (IBM, 2026), dense or a mixture: attention sinks, a window on three of four layers, a rope of each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec, RopeSpec
from quire.model.families import granite, granitemoe
from quire.model.families.blocks import read_is_sliding, window_of
from quire.model.families.config_view import ConfigView, is_number
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Source, Sources

MODEL_TYPE = "granite_swa"
MOE_MODEL_TYPE = "granitemoe_swa"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Granite model with windows."""
    return _assemble(config, granite.read_layer(config))


def read_moe_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Granite mixture with windows."""
    return _assemble(config, granitemoe.read_layer(config))


def _assemble(config: ConfigView, layer: LayerSpec) -> ModelSpec:
    is_sliding = read_is_sliding(config, lambda index: index % 4 != 0)
    window, ropes = window_of(config, is_sliding), _read_ropes(config, layer.attention.rope)
    attentions = [
        replace(layer.attention, rope=rope, window=window if slides else None, has_sinks=True)
        for rope, slides in zip(ropes, is_sliding, strict=True)
    ]
    return granite.assemble_scaled(config, [replace(layer, attention=attention) for attention in attentions])


def _read_ropes(config: ConfigView, rope: RopeSpec | None) -> list[RopeSpec | None]:
    """Return the rope of each layer: one for all, or those of which `layer_rope_theta` has the bases."""
    num_layers, thetas = config.integer("num_hidden_layers"), config.raw("layer_rope_theta")
    if thetas is None or rope is None:
        return [rope] * num_layers
    if not isinstance(thetas, list) or len(thetas) != num_layers or not all(is_number(t) and t >= 0 for t in thetas):
        raise config.error("layer_rope_theta", thetas, f"{num_layers} numbers, 0 of layers without a rope")
    return [replace(rope, theta=float(theta)) if theta else None for theta in thetas]


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    page = granitemoe if spec.model_type == MOE_MODEL_TYPE else granite
    sources = page.PAGE.find_sources(spec, stored)
    return sources | {f"layers.{i}.sinks.weight": Source.of(f"layers.{i}.self_attn.sinks") for i in range(len(spec.layers))}


PAGE = FamilyPage(("GraniteSWAForCausalLM",), read_spec, find_sources)
MOE_PAGE = FamilyPage(("GraniteMoeSWAForCausalLM",), read_moe_spec, find_sources)
