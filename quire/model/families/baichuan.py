"""Baichuan 7B and 13B (code of its own): Llama with q, k and v in one matrix; 13B has ALiBi. Baichuan 2 is refused."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.base.errors import UnsupportedError
from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import alibi_slopes, read_attention, read_mlp, read_rms_norm, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import PRE_NORM_LAYER, Sources, join_qkv, rename

MODEL_TYPE = "baichuan"


_NUM_LAYERS_OF_13B = 40
_VOCAB_SIZE_OF_2, _MAX_POSITIONS = 125696, 4096


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Baichuan model."""
    if config.integer("vocab_size") == _VOCAB_SIZE_OF_2:
        raise UnsupportedError("Baichuan 2 is not supported, as it normalises its head; supported: Baichuan 7B, 13B")
    norm, attention = read_rms_norm(config), read_attention(config)
    if config.integer("num_hidden_layers") == _NUM_LAYERS_OF_13B:
        attention = replace(attention, rope=None, alibi_slopes=alibi_slopes(attention.num_heads))
    layer = LayerSpec(attention, read_mlp(config), attn_in=norm, mlp_in=norm)
    positions = config.nullable_integer("max_position_embeddings", "model_max_length")
    return repeat_layer(config, layer, norm, max_positions=positions or _MAX_POSITIONS)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored: rows of W_pack are q, k, v."""
    sources = rename(spec, PRE_NORM_LAYER)
    join_qkv(sources, spec, "layers.{}.self_attn.W_pack")
    return sources


PAGE = FamilyPage(("BaichuanForCausalLM", "BaiChuanForCausalLM"), read_spec, find_sources)
