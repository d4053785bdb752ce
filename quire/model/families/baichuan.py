"""Baichuan 7B and 13B (code of its own): joined q, k and v; 13B has ALiBi; 2 (vocab_size 125,696) normalises its head."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import alibi_slopes, read_attention, read_mlp, read_rms_norm, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import PRE_NORM_LAYER, Sources, join_qkv, rename

MODEL_TYPE = "baichuan"


_NUM_LAYERS_OF_13B = 40
_MAX_POSITIONS = 4096
VOCAB_SIZE_OF_2 = 125696
"""Of Baichuan 2, whose config.json says nothing else of it."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Baichuan model."""
    if config.integer("vocab_size") == VOCAB_SIZE_OF_2:
        config.refuse_other("tie_word_embeddings", False)
    norm, attention = read_rms_norm(config), read_attention(config)
    if config.integer("num_hidden_layers") == _NUM_LAYERS_OF_13B:
        attention = replace(attention, rope=None, alibi_slopes=alibi_slopes(attention.num_heads))
    layer = LayerSpec(attention, read_mlp(config), attn_in=norm, mlp_in=norm)
    positions = config.nullable_integer("max_position_embeddings", "model_max_length")
    return repeat_layer(config, layer, norm, max_positions=positions or _MAX_POSITIONS)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored: rows of W_pack are q, k, v, and those of the head of Baichuan 2 are normalised."""
    sources = rename(spec, PRE_NORM_LAYER)
    join_qkv(sources, spec, "layers.{}.self_attn.W_pack")
    if spec.vocab_size == VOCAB_SIZE_OF_2 and not spec.is_tied:
        sources["lm_head.weight"] = replace(sources["lm_head.weight"], is_unit=True)
    return sources


PAGE = FamilyPage(("BaichuanForCausalLM", "BaiChuanForCausalLM"), read_spec, find_sources)
