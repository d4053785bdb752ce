"""MiniMax-M2 (2025): sigmoid scores with a correction, a norm over all of q and k, a part of each head rotated."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import assemble, read_attention, read_head_dim, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import MixtureNames, find_mixture_sources, read_moe
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import PRE_NORM_LAYER, Sources, rename

MODEL_TYPE = "minimax_m2"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a MiniMax-M2 model."""
    norm = read_rms_norm(config)
    rope = read_rope(config, read_head_dim(config), can_be_partial=True, rotary_dim=config.nullable_integer("rotary_dim"))
    attention = replace(read_attention(config, rope), qk_norm=norm, qk_norm_over="all")
    moe = read_moe(config, "intermediate_size")
    moe = replace(moe, scoring="sigmoid", has_correction=True, is_weight_f32=True)
    layer = LayerSpec(attention, moe, attn_in=norm, mlp_in=norm)
    return assemble(config, [layer] * config.integer("num_hidden_layers"), norm)


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored: in `block_sparse_moe`, or in `mlp` as transformers 5 names it."""
    block = "mlp" if "layers.0.mlp.gate.weight" in stored else "block_sparse_moe"
    names = MixtureNames(block, correction=("e_score_correction_bias",), expert=("w1", "w3", "w2"))
    return rename(spec, PRE_NORM_LAYER) | find_mixture_sources(spec, stored, names)


PAGE = FamilyPage(("MiniMaxM2ForCausalLM",), read_spec, find_sources)
