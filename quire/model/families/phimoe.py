"""Phi-3.5-MoE: SparseMixer routing of two experts, layer norms with biases, LongRoPE, and a bias on the head."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec, NormSpec
from quire.model.families.blocks import assemble, read_attention, read_head_dim
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import MixtureNames, find_mixture_sources, read_moe
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import PRE_NORM_LAYER, Sources, rename

MODEL_TYPE = "phimoe"
_NUM_CHOSEN = 2
"""SparseMixer is written for two experts a token."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Phi-3.5-MoE model."""
    norm = NormSpec("layer", config.number("rms_norm_eps"), has_bias=True)
    attention = read_attention(config, read_rope(config, read_head_dim(config)), has_bias=config.boolean("attention_bias"))
    attention = replace(attention, window=config.nullable_integer("sliding_window"))
    moe = read_moe(config, "intermediate_size")
    config.refuse_other("num_experts_per_tok", _NUM_CHOSEN)
    jitter = config.number("router_jitter_noise", is_positive=False)
    moe = replace(moe, scoring="sparse", sparse_margin=2 * jitter, is_renormalized=False)
    layers = [LayerSpec(attention, moe, attn_in=norm, mlp_in=norm)] * config.integer("num_hidden_layers")
    return replace(assemble(config, layers, norm), has_head_bias=config.boolean("lm_head_bias"))


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored: in `block_sparse_moe`, or in `mlp` as transformers 5 names it."""
    is_new = "layers.0.mlp.router.weight" in stored
    names = MixtureNames("mlp", "router.weight") if is_new else MixtureNames("block_sparse_moe")
    return rename(spec, PRE_NORM_LAYER) | find_mixture_sources(spec, stored, replace(names, expert=("w1", "w3", "w2")))


PAGE = FamilyPage(("PhimoeForCausalLM", "PhiMoEForCausalLM"), read_spec, find_sources)
