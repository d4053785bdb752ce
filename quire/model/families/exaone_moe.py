"""EXAONE mixture of experts (K-EXAONE): DeepSeek-V3's mixture; with windows, only layers that have one are rotated."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import assemble, read_attention, read_is_sliding, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import MixtureNames, find_mixture_sources, read_sigmoid_moe, read_sparse_layers
from quire.model.families.page import FamilyPage
from quire.model.families.sources import PRE_NORM_LAYER, Sources, rename

MODEL_TYPE = "exaone_moe"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an EXAONE-MoE model."""
    norm = read_rms_norm(config)
    attention = replace(read_attention(config), qk_norm=norm)
    window, pattern = config.nullable_integer("sliding_window"), config.nullable_integer("sliding_window_pattern", minimum=0)
    is_sliding = read_is_sliding(config, lambda index: window is not None and bool(pattern) and (index + 1) % pattern != 0)
    if any(is_sliding) and window is None:
        raise config.error("sliding_window", None, "an integer >= 1, as some layers have a window")
    whole = attention if window is None else replace(attention, rope=None)
    dense, moe = read_mlp(config), read_sigmoid_moe(config, "num_shared_experts")
    layers = [
        LayerSpec(
            replace(attention, window=window) if slides else whole, moe if is_sparse else dense, attn_in=norm, mlp_in=norm
        )
        for slides, is_sparse in zip(is_sliding, read_sparse_layers(config), strict=True)
    ]
    return assemble(config, layers, norm)


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    names = MixtureNames(correction=("e_score_correction_bias", "gate.e_score_correction_bias"))
    return rename(spec, PRE_NORM_LAYER) | find_mixture_sources(spec, stored, names)


PAGE = FamilyPage(("ExaoneMoeForCausalLM",), read_spec, find_sources)
