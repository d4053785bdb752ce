"""Kimi Linear (Moonshot AI, 2025): delta nets with a decay per row of the state, and latent attention without positions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from quire.contracts.mixer_spec import GatedDeltaSpec
from quire.contracts.model_spec import NO_ATTENTION, LayerSpec, ModelSpec, MoeSpec
from quire.model.families import latent
from quire.model.families.blocks import assemble, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.layer_kinds import read_layer_kinds
from quire.model.families.mamba_blocks import check_silu
from quire.model.families.mixtures import (
    LEAST_SUM,
    MixtureNames,
    find_mixture_sources,
    read_groups,
    read_moe,
    read_shared_expert,
    read_sparse_layers,
)
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Piece, Source, Sources

MODEL_TYPE = "kimi_linear"

_MIXTURE = MixtureNames(block="block_sparse_moe", expert=("w1", "w3", "w2"))
_ATTENTION_EVERY = 4
_OLD_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Names in the files of its authors -> those of transformers."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Kimi Linear model."""
    config = config.renamed(_OLD_NAMES)
    norm, dense = read_rms_norm(config), read_mlp(config)
    attention = replace(latent.read_latent_attention(config), rope=None)
    is_sparse = read_sparse_layers(config)
    moe = _read_moe(config) if any(is_sparse) else dense
    own = config.table("linear_attn_config")
    delta, kinds = _read_delta(config, own), _read_kinds(config, own)
    layers = [
        LayerSpec(NO_ATTENTION, moe if sparse else dense, attn_in=norm, mlp_in=norm, mixer=delta)
        if is_recurrent
        else LayerSpec(attention, moe if sparse else dense, attn_in=norm, mlp_in=norm)
        for is_recurrent, sparse in zip(kinds, is_sparse, strict=True)
    ]
    return assemble(config, layers, norm, has_own_layer_types=True)


def _read_moe(config: ConfigView) -> MoeSpec:
    moe = read_moe(config, "moe_intermediate_size", counts=("num_local_experts",))
    return replace(
        moe,
        scoring="sigmoid",
        has_correction=True,
        is_renormalized=config.boolean("norm_topk_prob"),
        is_weight_f32=True,
        is_router_f32=True,
        least_sum=LEAST_SUM,
        routed_scale=config.number("routed_scaling_factor"),
        groups=read_groups(config, moe, num_best=2),
        shared=read_shared_expert(config, moe, "n_shared_experts"),
    )


def _read_delta(config: ConfigView, own: Mapping[str, object]) -> GatedDeltaSpec:
    check_silu(config, "hidden_act")

    def size(key: str, outer: str, minimum: int = 1) -> int:
        value = own.get(key)
        if value is None:
            return config.integer(outer, minimum=minimum)
        if type(value) is not int or not minimum <= value <= 1 << 20:
            raise config.error(f"linear_attn_config.{key}", value, f"an integer from {minimum} to 2**20")
        return value

    num_heads, dim = size("num_heads", "linear_num_heads"), size("head_dim", "linear_head_dim")
    taps = size("short_conv_kernel_size", "linear_conv_kernel_dim", 2)
    return GatedDeltaSpec(num_heads, num_heads, dim, dim, taps, config.number("rms_norm_eps"), gate_rank=dim)


def _read_kinds(config: ConfigView, own: Mapping[str, object]) -> list[bool]:
    """Return for each layer whether it is recurrent; `linear_attn_config` counts layers from 1."""
    attended, recurrent = own.get("full_attn_layers"), own.get("kda_layers")
    if config.has("layer_types") or attended is None or recurrent is None:
        return read_layer_kinds(config, "linear_attention", lambda index: index == 0 or index % _ATTENTION_EVERY != 0)
    num_layers = config.integer("num_hidden_layers")
    for key, value in (("full_attn_layers", attended), ("kda_layers", recurrent)):
        if not isinstance(value, list) or not all(type(one) is int for one in value):
            raise config.error(f"linear_attn_config.{key}", value, "a list of integers")
    if sorted([*attended, *recurrent]) != list(range(1, num_layers + 1)):  # type: ignore[misc]
        got = (attended, recurrent)
        raise config.error("linear_attn_config", got, f"full_attn_layers and kda_layers with each of 1 to {num_layers} once")
    return [index + 1 in recurrent for index in range(num_layers)]  # type: ignore[operator]


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored: transformers may save dense blocks under the name of the mixtures."""
    sources = latent.find_sources(spec, stored) | find_mixture_sources(spec, stored, _MIXTURE)
    for index, layer in enumerate(spec.layers):
        ours, block = f"layers.{index}", f"layers.{index}.block_sparse_moe"
        names = ("gate", "up", "down")
        if isinstance(layer.mlp, MoeSpec):
            if layer.mlp.shared is not None:
                sources |= {f"{ours}.shared.{n}.weight": Source.of(f"{block}.shared_experts.{n}_proj.weight") for n in names}
        elif f"{block}.gate_proj.weight" in stored:
            sources |= {f"{ours}.{name}.weight": Source.of(f"{block}.{name}_proj.weight") for name in names}
        if isinstance(layer.mixer, GatedDeltaSpec):
            sources |= _delta_sources(ours, f"{ours}.self_attn")
    return sources


def _delta_sources(ours: str, theirs: str) -> Sources:
    def join(kind: str) -> Source:
        return Source((tuple(Piece(f"{theirs}.{name}_{kind}.weight") for name in "qkv"),))

    return {
        f"{ours}.delta.qkv.weight": join("proj"),
        f"{ours}.conv.weight": join("conv1d"),
        f"{ours}.delta.a_in.weight": Source.of(f"{theirs}.f_a_proj.weight"),
        f"{ours}.delta.a.weight": Source.of(f"{theirs}.f_b_proj.weight"),
        f"{ours}.delta.a.step": Source.of(f"{theirs}.dt_bias"),
        f"{ours}.delta.a.log": Source.of(f"{theirs}.A_log"),
        f"{ours}.delta.b.weight": Source.of(f"{theirs}.b_proj.weight"),
        f"{ours}.delta.z_in.weight": Source.of(f"{theirs}.g_a_proj.weight"),
        f"{ours}.delta.z.weight": Source.of(f"{theirs}.g_b_proj.weight"),
        f"{ours}.delta.norm.weight": Source.of(f"{theirs}.o_norm.weight"),
        f"{ours}.delta.o.weight": Source.of(f"{theirs}.o_proj.weight"),
    }


PAGE = FamilyPage(("KimiLinearForCausalLM",), read_spec, find_sources)
