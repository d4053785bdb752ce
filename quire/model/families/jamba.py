"""Jamba (AI21, 2024): Mamba with norms of steps, B and C, and attention without positions; mixtures in some layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.mixer_spec import Mamba1Spec
from quire.contracts.model_spec import NO_ATTENTION, LayerSpec, ModelSpec
from quire.model.families.bamba import LAYER, TOP_NAMES
from quire.model.families.blocks import assemble, read_attention, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.mamba_blocks import MAMBA1_NAMES, check_silu, mixer_sources, read_step_rank
from quire.model.families.mixtures import MixtureNames, find_mixture_sources, read_moe
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Sources, rename
from quire.model.parameters import parameter_shapes

MODEL_TYPE = "jamba"

_MIXTURE = MixtureNames(block="feed_forward", router="router.weight")


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Jamba model."""
    norm, dense, mixer = read_rms_norm(config), read_mlp(config), _read_mixer(config)
    attention = replace(read_attention(config), rope=None)
    has_experts = config.integer("num_experts", "num_local_experts") > 1
    moe = replace(read_moe(config, "intermediate_size"), is_renormalized=False) if has_experts else dense
    is_attended, is_sparse = _read_periods(config, "attn_layer"), _read_periods(config, "expert_layer")
    layers = [
        LayerSpec(attention, moe if sparse else dense, attn_in=norm, mlp_in=norm)
        if attended
        else LayerSpec(NO_ATTENTION, moe if sparse else dense, attn_in=norm, mlp_in=norm, mixer=mixer)
        for attended, sparse in zip(is_attended, is_sparse, strict=True)
    ]
    return assemble(config, layers, norm, has_own_layer_types=True)


def _read_periods(config: ConfigView, kind: str) -> list[bool]:
    """Return for each layer whether it is one of so many."""
    period, offset = config.integer(f"{kind}_period"), config.integer(f"{kind}_offset", minimum=0)
    if offset >= period:
        raise config.error(f"{kind}_offset", offset, f"less than {kind}_period ({period})")
    return [index % period == offset for index in range(config.integer("num_hidden_layers"))]


def _read_mixer(config: ConfigView) -> Mamba1Spec:
    check_silu(config, "hidden_act")
    return Mamba1Spec(
        int(config.number("mamba_expand") * config.integer("hidden_size")),
        config.integer("mamba_d_state"),
        read_step_rank(config, "mamba_dt_rank"),
        conv_size=config.integer("mamba_d_conv", minimum=2),
        norm_eps=config.number("rms_norm_eps"),
        has_norm_weight=True,
        has_bias=config.boolean("mamba_proj_bias"),
        has_conv_bias=config.boolean("mamba_conv_bias"),
    )


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    mixers = mixer_sources(spec, parameter_shapes(spec), MAMBA1_NAMES, "mamba")
    return rename(spec, LAYER, TOP_NAMES) | mixers | find_mixture_sources(spec, stored, _MIXTURE)


PAGE = FamilyPage(("JambaForCausalLM",), read_spec, find_sources)
