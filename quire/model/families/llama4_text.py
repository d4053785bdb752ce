"""Llama 4, text: adjacent pairs rotated, norms of heads after it, each fourth layer without rope."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.base.logging import get_logger
from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, QueryScaling
from quire.model.families.blocks import assemble, read_activation, read_attention, read_head_dim, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import find_llama4_sources, read_llama4_moe
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.smollm3 import read_has_rope
from quire.model.families.sources import PRE_NORM_LAYER, Sources, pair_halves, rename

logger = get_logger(__name__)

MODEL_TYPE = "llama4_text"


_LAYER = PRE_NORM_LAYER | {name: f"feed_forward.{name}_proj" for name in ("gate", "up", "down")}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Llama 4 text model, which takes sequences of one chunk (attention_chunk_size) at most."""
    norm = read_rms_norm(config)
    mlp = MlpSpec(config.integer("intermediate_size_mlp"), read_activation(config))
    rope = read_rope(config, read_head_dim(config), is_f32=True)
    with_rope, without_rope = _read_attentions(config, read_attention(config, rope, config.boolean("attention_bias")))
    mixtures = _read_mixture_layers(config)
    moe = read_llama4_moe(config) if mixtures else None
    layers = []
    for index, has_rope in enumerate(read_has_rope(config)):
        block = moe if moe is not None and index in mixtures else mlp
        layers.append(LayerSpec(with_rope if has_rope else without_rope, block, attn_in=norm, mlp_in=norm))
    positions, chunk = config.integer("max_position_embeddings"), config.nullable_integer("attention_chunk_size")
    if chunk is not None and chunk < positions:
        logger.warning("sequences may have %d tokens: attention in several chunks is not supported", chunk)
        positions = chunk
    return assemble(config, layers, norm, max_positions=positions)


def _read_mixture_layers(config: ConfigView) -> frozenset[int]:
    """Return the indices of the layers that are mixtures: those that moe_layers names, or every one after so many."""
    num_layers = config.integer("num_hidden_layers")
    if config.raw("moe_layers") is None:
        step = config.integer("interleave_moe_layer_step")
        return frozenset(range(step - 1, num_layers, step))
    indices = config.integers("moe_layers")
    if any(not 0 <= index < num_layers for index in indices):
        raise config.error("moe_layers", list(indices), f"indices of layers, from 0 to {num_layers - 1}")
    return frozenset(indices)


def _read_attentions(config: ConfigView, attention: AttentionSpec) -> tuple[AttentionSpec, AttentionSpec]:
    """Return attention of layers with a rotary embedding, and of those without."""
    head_norm = replace(read_rms_norm(config), has_weight=False) if config.boolean("use_qk_norm") else None
    scaling = None
    if config.boolean("attn_temperature_tuning"):
        scaling = QueryScaling(config.number("attn_scale"), config.integer("floor_scale"), offset=1)
    with_rope = replace(attention, qk_norm=head_norm, is_qk_norm_last=head_norm is not None)
    return with_rope, replace(attention, rope=None, query_scaling=scaling)


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return pair_halves(spec, rename(spec, _LAYER)) | find_llama4_sources(spec, stored)


PAGE = FamilyPage(("Llama4ForCausalLM",), read_spec, find_sources)
