"""AFMoE (Arcee Trinity, 2025): norms around both blocks, a gate on attention's output, windows with rope, a sigmoid mixture."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec, MoeSpec
from quire.model.families.blocks import assemble, read_attention, read_is_sliding, read_mlp, read_rms_norm, window_of
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import LEAST_SUM, MixtureNames, find_mixture_sources, read_moe, read_shared_expert
from quire.model.families.page import FamilyPage
from quire.model.families.sources import PRE_NORM_LAYER, Sources, rename

MODEL_TYPE = "afmoe"
_LAYER = {
    **PRE_NORM_LAYER,
    "attn_out": "post_attention_layernorm",
    "mlp_in": "pre_mlp_layernorm",
    "mlp_out": "post_mlp_layernorm",
    "attn_gate": "self_attn.gate_proj",
}
_MIXTURE = MixtureNames(router="router.gate.weight", correction=("expert_bias",))


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an AFMoE model."""
    config.refuse_other("attention_bias", False)
    norm, dense, moe = read_rms_norm(config, late_cast=True), read_mlp(config), _read_moe(config)
    period, first = config.integer("global_attn_every_n_layers"), config.integer("num_dense_layers", minimum=0)
    is_sliding = read_is_sliding(config, lambda index: (index + 1) % period != 0)
    near = replace(read_attention(config), qk_norm=norm, has_output_gate=True, window=window_of(config, is_sliding) or None)
    full = replace(near, rope=None, window=None)
    layers = [
        LayerSpec(near if slides else full, moe if index >= first else dense, norm, norm, norm, norm)
        for index, slides in enumerate(is_sliding)
    ]
    scale = config.integer("hidden_size") ** 0.5 if config.boolean("mup_enabled") else 1.0
    return assemble(config, layers, norm, embed_scale=scale)


def _read_moe(config: ConfigView) -> MoeSpec:
    moe = read_moe(config, "moe_intermediate_size")
    return replace(
        moe,
        scoring="sigmoid",
        has_correction=True,
        is_weight_f32=True,
        least_sum=LEAST_SUM,
        routed_scale=config.number("route_scale"),
        shared=read_shared_expert(config, moe, "num_shared_experts"),
    )


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return rename(spec, _LAYER) | find_mixture_sources(spec, stored, _MIXTURE)


PAGE = FamilyPage(("AfmoeForCausalLM",), read_spec, find_sources)
