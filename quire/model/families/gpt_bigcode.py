"""StarCoder 1 and SantaCoder (BigCode, 2023): GPT-2 whose heads share one head of keys and values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import ModelSpec
from quire.model.families import gpt2
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Sources, join_qkv, rename

MODEL_TYPE = "gpt_bigcode"
_LAYER = {"attn_in": "ln_1", "mlp_in": "ln_2", "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a StarCoder model."""
    spec, num_kv_heads = gpt2.read_spec(config), 1 if config.boolean("multi_query") else None
    layer = spec.layers[0]
    attention = layer.attention
    num_kv_heads = attention.num_heads if num_kv_heads is None else num_kv_heads
    is_f32 = config.boolean("attention_softmax_in_fp32")
    layer = replace(layer, attention=replace(attention, num_kv_heads=num_kv_heads, is_softmax_f32=is_f32))
    return replace(spec, layers=(layer,) * len(spec.layers))


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored: rows of c_attn are q, k, v, of each head where all have their own."""
    sources = rename(spec, _LAYER, gpt2.TOP, layers="h")
    join_qkv(sources, spec, "h.{}.attn.c_attn", by_group=True)
    return sources


PAGE = FamilyPage(("GPTBigCodeForCausalLM",), read_spec, find_sources, prefixes=("transformer.",), ignored=gpt2.IGNORED)
