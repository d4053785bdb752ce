"""StableLM: LayerNorm, a quarter of each head rotated; perhaps norms of each head and parallel blocks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import read_attention, read_head_dim, read_layer_norm, read_mlp, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import PRE_NORM_LAYER, Source, Sources, rename

MODEL_TYPE = "stablelm"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a StableLM model."""
    norm, is_parallel = read_layer_norm(config), config.boolean("use_parallel_residual")
    rope = read_rope(config, read_head_dim(config), can_be_partial=True)
    attention = replace(read_attention(config, rope), has_qkv_bias=config.boolean("use_qkv_bias"))
    if config.boolean("qk_layernorm"):
        attention = replace(attention, qk_norm=read_layer_norm(config, has_bias=False), qk_norm_over="each")
    layer = LayerSpec(attention, read_mlp(config), attn_in=norm, mlp_in=None if is_parallel else norm, is_parallel=is_parallel)
    return repeat_layer(config, layer, norm)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    sources = rename(spec, PRE_NORM_LAYER)
    for index, layer in enumerate(spec.layers):
        if layer.attention.qk_norm is None:
            continue
        for name, count in (("q", layer.attention.num_heads), ("k", layer.attention.num_kv_heads)):
            heads = [(f"layers.{index}.self_attn.{name}_layernorm.norms.{head}.weight",) for head in range(count)]
            sources[f"layers.{index}.{name}_norm.weight"] = Source.stack(heads)
    return sources


PAGE = FamilyPage(("StableLmForCausalLM",), read_spec, find_sources)
