"""Llama 4, text, without its mixtures: adjacent pairs rotated, norms of heads after it, each fourth layer without rope."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.base.errors import UnsupportedError
from quire.base.logging import get_logger
from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, QueryScaling
from quire.model.families.blocks import assemble, read_activation, read_attention, read_head_dim, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.smollm3 import read_has_rope
from quire.model.families.sources import PRE_NORM_LAYER, Sources, pair_halves, rename

logger = get_logger(__name__)

MODEL_TYPE = "llama4_text"


_LAYER = PRE_NORM_LAYER | {name: f"feed_forward.{name}_proj" for name in ("gate", "up", "down")}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Llama 4 text model, which takes sequences of one chunk (attention_chunk_size) at most."""
    _refuse_mixtures(config)
    norm = read_rms_norm(config)
    mlp = MlpSpec(config.integer("intermediate_size_mlp"), read_activation(config))
    rope = read_rope(config, read_head_dim(config), is_f32=True)
    with_rope, without_rope = _read_attentions(config, read_attention(config, rope, config.boolean("attention_bias")))
    layers = [
        LayerSpec(with_rope if has_rope else without_rope, mlp, attn_in=norm, mlp_in=norm) for has_rope in read_has_rope(config)
    ]
    positions, chunk = config.integer("max_position_embeddings"), config.nullable_integer("attention_chunk_size")
    if chunk is not None and chunk < positions:
        logger.warning("sequences may have %d tokens: attention in several chunks is not supported", chunk)
        positions = chunk
    return assemble(config, layers, norm, max_positions=positions)


def _refuse_mixtures(config: ConfigView) -> None:
    step, num_layers = config.integer("interleave_moe_layer_step"), config.integer("num_hidden_layers")
    is_named = config.has("moe_layers")
    mixtures = config.integers("moe_layers") if is_named else list(range(step - 1, num_layers, step))
    if mixtures:
        raise UnsupportedError(f"mixtures of experts (layers {mixtures}) are not supported in a 'llama4_text' model")


def _read_attentions(config: ConfigView, attention: AttentionSpec) -> tuple[AttentionSpec, AttentionSpec]:
    """Return attention of layers with a rotary embedding, and of those without."""
    head_norm = replace(read_rms_norm(config), has_weight=False) if config.boolean("use_qk_norm") else None
    scaling = None
    if config.boolean("attn_temperature_tuning"):
        scaling = QueryScaling(config.number("attn_scale"), config.integer("floor_scale"), offset=1)
    with_rope = replace(attention, qk_norm=head_norm, is_qk_norm_last=head_norm is not None)
    return with_rope, replace(attention, rope=None, query_scaling=scaling)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return pair_halves(spec, rename(spec, _LAYER))


PAGE = FamilyPage(("Llama4ForCausalLM",), read_spec, find_sources)
