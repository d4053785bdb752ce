"""OLMo Hybrid (Ai2, 2026): OLMo 3's attention, without windows, on each fourth layer; gated delta nets on the others."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.mixer_spec import GatedDeltaSpec
from quire.contracts.model_spec import NO_ATTENTION, AttentionSpec, LayerSpec, ModelSpec, NormSpec
from quire.model.families.blocks import assemble, read_activation, read_attention, read_head_dim, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.layer_kinds import read_layer_kinds
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import SANDWICH_LAYER, Piece, Source, Sources, rename

MODEL_TYPE = "olmo_hybrid"

_NORM_EPS = 1e-5
"""Of the norm of the heads of a delta net, independent of rms_norm_eps."""
_DELTA = {"z": "g_proj", "b": "b_proj", "a": "a_proj", "o": "o_proj", "norm": "o_norm"}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an OLMo Hybrid model: norms are before the blocks of a delta net, and after those of attention."""
    norm, mlp = read_rms_norm(config, late_cast=True), read_mlp(config)
    kinds = read_layer_kinds(config, "linear_attention", _default_kinds(config.integer("num_hidden_layers")).__getitem__)
    attention, delta = _read_attention(config, norm), _read_delta(config)
    layers = [
        LayerSpec(NO_ATTENTION, mlp, attn_in=norm, mlp_in=norm, mixer=delta)
        if is_recurrent
        else LayerSpec(attention, mlp, attn_out=norm, mlp_out=norm)
        for is_recurrent in kinds
    ]
    return assemble(config, layers, norm, has_own_layer_types=True)


def _default_kinds(num_layers: int) -> list[bool]:
    return [index % 4 != 3 and not (num_layers < 4 and index == num_layers - 1) for index in range(num_layers)]


def _read_attention(config: ConfigView, norm: NormSpec) -> AttentionSpec:
    """Return attention, which has no rope where rope_theta is null."""
    values = config.table("rope_parameters")
    has_rope = values.get("rope_theta", 0) is not None
    rope = read_rope(config, read_head_dim(config), is_f32=True) if has_rope else None
    attention = read_attention(config, rope, config.boolean("attention_bias"))
    return replace(attention, rope=rope, qk_norm=norm, qk_norm_over="all")


def _read_delta(config: ConfigView) -> GatedDeltaSpec:
    num_heads = [config.nullable_integer(f"linear_num_{one}_heads") for one in ("key", "value")]
    num_k_heads, num_v_heads = (config.integer("num_attention_heads") if one is None else one for one in num_heads)
    if num_v_heads != num_k_heads:
        raise config.error("linear_num_value_heads", num_v_heads, f"linear_num_key_heads ({num_k_heads})")
    if read_activation(config) != "silu":
        raise config.error("hidden_act", config.string("hidden_act"), "'silu', which the gated delta net has")
    k_dim = config.nullable_integer("linear_key_head_dim")
    k_dim = int(0.75 * config.integer("hidden_size") / num_k_heads) if k_dim is None else k_dim
    v_dim = config.nullable_integer("linear_value_head_dim")
    return GatedDeltaSpec(
        num_k_heads,
        num_v_heads,
        k_dim,
        2 * k_dim if v_dim is None else v_dim,
        conv_size=config.integer("linear_conv_kernel_dim", minimum=2),
        norm_eps=_NORM_EPS,
        write_scale=2.0 if config.boolean("linear_allow_neg_eigval") else 1.0,
    )


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored; transformers has other names for norms of some layers."""
    sources = rename(spec, SANDWICH_LAYER)
    for index, layer in enumerate(spec.layers):
        ours, theirs = f"layers.{index}", f"layers.{index}.linear_attn"
        first, second = f"{ours}.attention_layer_norm.weight", f"{ours}.feedforward_layer_norm.weight"
        if not isinstance(layer.mixer, GatedDeltaSpec):
            if second in stored:
                sources[f"{ours}.attn_out.weight"] = Source.of(second)
            continue
        is_renamed = first not in stored
        sources[f"{ours}.attn_in.weight"] = Source.of(f"{ours}.input_layernorm.weight" if is_renamed else first)
        sources[f"{ours}.mlp_in.weight"] = Source.of(f"{ours}.post_attention_layernorm.weight" if is_renamed else second)
        sources |= {f"{ours}.delta.{name}.weight": Source.of(f"{theirs}.{one}.weight") for name, one in _DELTA.items()}
        sources[f"{ours}.delta.a.step"] = Source.of(f"{theirs}.dt_bias")
        sources[f"{ours}.delta.a.log"] = Source.of(f"{theirs}.A_log")
        sources |= _joined(layer.mixer, ours, theirs, stored)
    return sources


def _joined(spec: GatedDeltaSpec, ours: str, theirs: str, stored: Collection[str]) -> Sources:
    """Return sources of q, k and v, and of the convolution over them."""
    sizes = {"q": spec.num_k_heads * spec.k_dim, "k": spec.num_k_heads * spec.k_dim, "v": spec.num_v_heads * spec.v_dim}

    def pieces(end: str) -> Source:
        return Source((tuple(Piece(f"{theirs}.{name}_{end}.weight", (0, size)) for name, size in sizes.items()),))

    whole = f"{theirs}.conv1d.weight"
    conv = Source.of(whole) if whole in stored else pieces("conv1d")
    return {f"{ours}.delta.qkv.weight": pieces("proj"), f"{ours}.conv.weight": conv}


PAGE = FamilyPage(("OlmoHybridForCausalLM",), read_spec, find_sources)
