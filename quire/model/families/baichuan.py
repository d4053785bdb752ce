"""Baichuan 7B (code of its own): Llama with q, k and v in one matrix. The 13B models, which have ALiBi, are refused."""

from __future__ import annotations

from collections.abc import Collection

from quire.base.errors import UnsupportedError
from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import read_attention, read_mlp, read_rms_norm, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import PRE_NORM_LAYER, Sources, join_rows, rename

MODEL_TYPE = "baichuan"


_HIDDEN_SIZE_OF_13B = 5120
_VOCAB_SIZE_OF_2 = 125696


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Baichuan 7B model."""
    if config.integer("hidden_size") == _HIDDEN_SIZE_OF_13B:
        raise UnsupportedError("Baichuan 13B is not supported, as it has ALiBi; supported: Baichuan 7B")
    if config.integer("vocab_size") == _VOCAB_SIZE_OF_2:
        raise UnsupportedError("Baichuan 2 is not supported, as it normalises its head; supported: Baichuan 7B")
    norm = read_rms_norm(config)
    layer = LayerSpec(read_attention(config), read_mlp(config), attn_in=norm, mlp_in=norm)
    return repeat_layer(config, layer, norm)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored: rows of W_pack are q, k, v."""
    sources = rename(spec, PRE_NORM_LAYER)
    for index, layer in enumerate(spec.layers):
        size = layer.attention.num_heads * layer.attention.head_dim
        names = {f"layers.{index}.{name}.weight": size for name in "qkv"}
        join_rows(sources, names, f"layers.{index}.self_attn.W_pack.weight")
    return sources


PAGE = FamilyPage(("BaichuanForCausalLM", "BaiChuanForCausalLM"), read_spec, find_sources)
