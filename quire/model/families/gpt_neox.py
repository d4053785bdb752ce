"""GPT-NeoX and Pythia: LayerNorm, parallel blocks of a norm each, a part of each head rotated, q, k, v of a head together; and
GPT-NeoX Japanese, in sequence and without biases but one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, MlpSpec, ModelSpec
from quire.model.families.blocks import (
    assemble,
    read_activation,
    read_attention,
    read_head_dim,
    read_layer_norm,
    read_mlp,
    repeat_layer,
)
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import Source, Sources, join_qkv, rename

MODEL_TYPE = "gpt_neox"
JAPANESE_MODEL_TYPE = "gpt_neox_japanese"

_TOP = {"embed": "embed_in", "final_norm": "final_layer_norm", "lm_head": "lm_head"}
LAYER = {
    "attn_in": "input_layernorm",
    "mlp_in": "post_attention_layernorm",
    "o": "attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a GPT-NeoX model."""
    norm, has_bias = read_layer_norm(config), config.boolean("attention_bias")
    rope = read_rope(config, read_head_dim(config), can_be_partial=True)
    attention = read_attention(config, rope, has_bias)
    attention = replace(attention, num_kv_heads=attention.num_heads)
    mlp = read_mlp(config, has_bias=True, is_gated=False)
    is_parallel = config.boolean("use_parallel_residual")
    return repeat_layer(config, LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm, is_parallel=is_parallel), norm)


def read_japanese_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a GPT-NeoX Japanese model, whose last layer has a bias after attention."""
    norm, hidden_size = read_layer_norm(config), config.integer("hidden_size")
    attention = read_attention(config, read_rope(config, read_head_dim(config), can_be_partial=True))
    attention = replace(attention, num_kv_heads=attention.num_heads)
    inner = config.integer("intermediate_multiple_size") * hidden_size
    layer = LayerSpec(attention, MlpSpec(inner, read_activation(config), is_gated=False), attn_in=norm, mlp_in=norm)
    layers = [layer] * config.integer("num_hidden_layers")
    layers[-1] = replace(layer, attention=replace(attention, has_o_bias=True))
    return assemble(config, layers, norm)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    sources = find_joined_sources(spec, LAYER, _TOP, "attention")
    if spec.model_type == JAPANESE_MODEL_TYPE:
        last = len(spec.layers) - 1
        sources[f"layers.{last}.o.bias"] = Source.of(f"layers.{last}.attention.dense_bias")
    return sources


def find_joined_sources(
    spec: ModelSpec, names: Mapping[str, str], top: Mapping[str, str], block: str, layers: str = "layers"
) -> Sources:
    """Return sources where rows of {block}.query_key_value are q, k and v of the first head, then of the next."""
    sources = rename(spec, names, top, layers)
    join_qkv(sources, spec, f"{layers}.{{}}.{block}.query_key_value", by_group=True)
    return sources


JAPANESE_PAGE = FamilyPage(
    ("GPTNeoXJapaneseForCausalLM",), read_japanese_spec, find_sources, prefixes=("gpt_neox_japanese.",), head="embed_out"
)
PAGE = FamilyPage(
    ("GPTNeoXForCausalLM",),
    read_spec,
    find_sources,
    prefixes=("gpt_neox.",),
    ignored=re.compile(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
    head="embed_out",
)
