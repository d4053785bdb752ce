"""Laguna (Poolside, 2026): a gate of each head after attention, windows with a rope of their own, a sigmoid mixture."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.base.errors import UnsupportedError
from quire.contracts.model_spec import AttentionSpec, LayerSpec, ModelSpec, MoeSpec
from quire.model.families.blocks import assemble, read_attention, read_is_sliding, read_mlp, read_rms_norm, window_of
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import MixtureNames, find_mixture_sources, read_moe, read_sparse_layers
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_layer_rope
from quire.model.families.sources import PRE_NORM_LAYER, Sources, rename

MODEL_TYPE = "laguna"
_LAYER = {**PRE_NORM_LAYER, "attn_gate": "self_attn.g_proj"}
_CORRECTIONS = ("experts.e_score_correction_bias", "gate.e_score_correction_bias")
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "gating": (True, "per-head"),
    "moe_apply_router_weight_on_input": (False,),
    "moe_router_logit_softcapping": (0,),
}
"""Options that are refused with another value."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Laguna model."""
    for key, allowed in _SUPPORTED.items():
        if config.raw(key) not in (None, *allowed):
            names = " or ".join(map(repr, allowed))
            raise UnsupportedError(f"{key} {config.raw(key)!r} is not supported in a {config.model_type!r} model: {names}")
    norm, dense, moe = read_rms_norm(config), read_mlp(config), _read_moe(config)
    is_sliding, is_sparse = read_is_sliding(config, lambda _: False), read_sparse_layers(config)
    layers = [
        LayerSpec(attention, moe if sparse else dense, attn_in=norm, mlp_in=norm)
        for attention, sparse in zip(_read_attentions(config, is_sliding), is_sparse, strict=True)
    ]
    return assemble(config, layers, norm)


def _read_attentions(config: ConfigView, is_sliding: list[bool]) -> list[AttentionSpec]:
    """Return the attention of each layer, which may have a number of heads of its own."""
    head_dim, window = config.integer("head_dim"), window_of(config, is_sliding)
    counts = config.integers("num_attention_heads_per_layer") or [config.integer("num_attention_heads")] * len(is_sliding)
    num_kv_heads = config.integer("num_key_value_heads")
    if len(counts) != len(is_sliding) or any(count == 0 or count % num_kv_heads for count in counts):
        raise config.error("num_attention_heads_per_layer", counts, f"{len(is_sliding)} multiples of {num_kv_heads}")
    full_rope = read_layer_rope(config, head_dim, "full_attention", can_be_partial=True)
    near_rope = read_layer_rope(config, head_dim, "sliding_attention", can_be_partial=True)
    full = replace(read_attention(config, full_rope), qk_norm=read_rms_norm(config), has_output_gate=True, has_head_gate=True)
    near = replace(full, rope=near_rope, window=window or None)
    return [replace(near if slides else full, num_heads=n) for slides, n in zip(is_sliding, counts, strict=True)]


def _read_moe(config: ConfigView) -> MoeSpec:
    moe = read_moe(config, "moe_intermediate_size")
    return replace(
        moe,
        scoring="sigmoid",
        has_correction=True,
        routed_scale=config.number("moe_routed_scaling_factor"),
        shared=replace(moe.expert, intermediate_size=config.integer("shared_expert_intermediate_size")),
    )


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored, under the names of its authors or of transformers."""
    is_library = any(".mlp.shared_experts." in name for name in stored)
    names = MixtureNames(correction=_CORRECTIONS, shared="shared_experts" if is_library else "shared_expert")
    return rename(spec, _LAYER) | find_mixture_sources(spec, stored, names)


PAGE = FamilyPage(("LagunaForCausalLM",), read_spec, find_sources)
