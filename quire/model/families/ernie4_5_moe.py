"""ERNIE 4.5 mixture of experts: pairs of neighbours are rotated; softmax scores, chosen with a correction; shared experts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import assemble, read_attention, read_head_dim, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import MixtureNames, find_mixture_sources, read_moe, read_shared_expert
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import PRE_NORM_LAYER, Sources, pair_halves, rename

MODEL_TYPE = "ernie4_5_moe"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an ERNIE 4.5 mixture."""
    norm, has_bias = read_rms_norm(config), config.boolean("use_bias")
    rope = read_rope(config, read_head_dim(config), is_f32=True)
    attention, dense = read_attention(config, rope, has_bias=has_bias), read_mlp(config, has_bias=has_bias)
    moe = read_moe(config, "moe_intermediate_size", counts=("moe_num_experts", "num_experts"), top_k="moe_k")
    shared = read_shared_expert(config, moe, "moe_num_shared_experts")
    moe = replace(
        moe,
        has_correction=True,
        is_router_f32=True,
        least_sum=config.number("moe_norm_min"),
        shared=None if shared is None else replace(shared, has_bias=has_bias),
    )
    num_layers, interval = config.integer("num_hidden_layers"), config.integer("moe_layer_interval")
    first, last = config.integer("moe_layer_start_index", minimum=0), config.integer("moe_layer_end_index", minimum=-1)
    last = num_layers - 1 if last == -1 else last
    layers = [
        LayerSpec(
            attention, moe if (index + 1) % interval == 0 and first <= index <= last else dense, attn_in=norm, mlp_in=norm
        )
        for index in range(num_layers)
    ]
    return replace(assemble(config, layers, norm), has_head_bias=has_bias)


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    names = MixtureNames(
        correction=("moe_statics.e_score_correction_bias", "gate.moe_statics.e_score_correction_bias"),
        has_correction_rows=True,
    )
    return pair_halves(spec, rename(spec, PRE_NORM_LAYER)) | find_mixture_sources(spec, stored, names)


PAGE = FamilyPage(("Ernie4_5_MoeForCausalLM",), read_spec, find_sources)
