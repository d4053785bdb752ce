"""Phi-3 and Phi-4: Llama with q, k, v in one matrix and gate, up in another; partial rotary and LongRoPE."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, MlpSpec, ModelSpec
from quire.model.families.blocks import assemble, read_attention, read_head_dim, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import PRE_NORM_LAYER, Sources, join_qkv, join_rows, rename

MODEL_TYPE = "phi3"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Phi-3 model."""
    norm = read_rms_norm(config)
    rope = read_rope(config, read_head_dim(config), can_be_partial=True)
    attention = replace(read_attention(config, rope), window=config.nullable_integer("sliding_window"))
    layer = LayerSpec(attention, read_mlp(config), attn_in=norm, mlp_in=norm)
    return assemble(config, [layer] * config.integer("num_hidden_layers"), norm)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored: rows of qkv_proj are q, k, v, rows of gate_up_proj are gate, up."""
    sources = rename(spec, PRE_NORM_LAYER)
    join_qkv(sources, spec, "layers.{}.self_attn.qkv_proj")
    for index, layer in enumerate(spec.layers):
        assert isinstance(layer.mlp, MlpSpec)
        names = {f"layers.{index}.{name}.weight": layer.mlp.intermediate_size for name in ("gate", "up")}
        join_rows(sources, names, f"layers.{index}.mlp.gate_up_proj.weight")
    return sources


PAGE = FamilyPage(("Phi3ForCausalLM",), read_spec, find_sources)
