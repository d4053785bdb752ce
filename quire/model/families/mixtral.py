"""Mixtral (Jiang et al., 2024): Mistral with a mixture of experts; the weights of experts stay f32. Window absent is none."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import assemble, read_attention, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import MixtureNames, find_mixture_sources, read_moe
from quire.model.families.page import FamilyPage
from quire.model.families.sources import PRE_NORM_LAYER, Sources, rename

MODEL_TYPE = "mixtral"
MIXTURE, STORED_MIXTURE = (MixtureNames(block, expert=("w1", "w3", "w2")) for block in ("mlp", "block_sparse_moe"))


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Mixtral model."""
    norm = read_rms_norm(config)
    attention = replace(read_attention(config), window=config.nullable_integer("sliding_window"))
    moe = replace(read_moe(config, "intermediate_size"), is_weight_f32=True)
    layer = LayerSpec(attention, moe, attn_in=norm, mlp_in=norm)
    return assemble(config, [layer] * config.integer("num_hidden_layers"), norm)


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored: in `block_sparse_moe`, or in `mlp` as transformers 5 names it."""
    names = MIXTURE if "layers.0.mlp.gate.weight" in stored else STORED_MIXTURE
    return rename(spec, PRE_NORM_LAYER) | find_mixture_sources(spec, stored, names)


PAGE = FamilyPage(("MixtralForCausalLM",), read_spec, find_sources)
