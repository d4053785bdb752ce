"""GLM-4 9B (2024): adjacent pairs of half of each head are rotated, q, k and v have biases, gate and up lie in one matrix."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, MlpSpec, ModelSpec
from quire.model.families.blocks import read_attention, read_head_dim, read_mlp, read_rms_norm, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import PRE_NORM_LAYER, Sources, join_rows, pair_halves, rename

MODEL_TYPE = "glm"


def read_layer(config: ConfigView) -> LayerSpec:
    """Return a layer of GLM-4."""
    norm = read_rms_norm(config)
    rope = read_rope(config, read_head_dim(config), can_be_partial=True)
    attention = replace(read_attention(config, rope), has_qkv_bias=config.boolean("attention_bias"))
    return LayerSpec(attention, read_mlp(config), attn_in=norm, mlp_in=norm)


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a GLM-4 model."""
    return repeat_layer(config, read_layer(config), read_rms_norm(config))


def find_layers(spec: ModelSpec, names: Mapping[str, str]) -> Sources:
    """Return where each parameter is stored; names: of a layer's modules, see `rename`."""
    sources = rename(spec, names)
    for index, layer in enumerate(spec.layers):
        assert isinstance(layer.mlp, MlpSpec)
        inner, prefix = layer.mlp.intermediate_size, f"layers.{index}"
        join_rows(sources, {f"{prefix}.{name}.weight": inner for name in ("gate", "up")}, f"{prefix}.mlp.gate_up_proj.weight")
    return pair_halves(spec, sources)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return find_layers(spec, PRE_NORM_LAYER)


PAGE = FamilyPage(("GlmForCausalLM",), read_spec, find_sources)
