"""MiMo-V2-Flash (Xiaomi, 2025): values smaller than keys; five of six layers have a window, sinks and more KV heads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.base.errors import UnsupportedError
from quire.contracts.model_spec import AttentionSpec, LayerSpec, ModelSpec
from quire.model.families.blocks import assemble, read_is_sliding, read_mlp, read_rms_norm, window_of
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import find_mixture_sources, read_sigmoid_moe
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import LayerType, read_named_rope
from quire.model.families.sources import PRE_NORM_LAYER, Source, Sources, rename

MODEL_TYPE = "mimo_v2_flash"

_KV_HEADS_WITH_WINDOW = 2
"""How many times as many key and value heads layers with a window have."""
_THETA = {"full_attention": "rope_theta", "sliding_attention": "swa_rope_theta"}
"""Keys of the published files, which transformers does not read."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a MiMo-V2-Flash model."""
    norm, dense = read_rms_norm(config), read_mlp(config)
    moe = replace(read_sigmoid_moe(config), shared=None)  # transformers has none, whatever the file says
    is_sliding = read_is_sliding(config, lambda index: index > 0 and (index + 1) % 6 != 0)
    _compare(config, "hybrid_layer_pattern", is_sliding)
    is_sparse = _read_is_sparse(config)
    _compare(config, "moe_layer_freq", is_sparse)
    before = config.nullable_integer("sliding_window_size") if config.has("sliding_window_size") else None
    window = window_of(config, is_sliding) if before is None else before + 1
    full, near = _read_attention(config, "full_attention", None), _read_attention(config, "sliding_attention", window)
    layers = [
        LayerSpec(near if slides else full, moe if sparse else dense, attn_in=norm, mlp_in=norm)
        for slides, sparse in zip(is_sliding, is_sparse, strict=True)
    ]
    return assemble(config, layers, norm)


def _compare(config: ConfigView, key: str, expected: list[bool]) -> None:
    """Refuse a published list of 0 and 1 that says another thing than what transformers takes for granted."""
    given = config.raw(key)
    if given is not None and given != [int(flag) for flag in expected]:
        raise UnsupportedError(f"{key} {given!r:.200} is not supported: expected {[int(flag) for flag in expected]}")


def _read_is_sparse(config: ConfigView) -> list[bool]:
    num_layers, types = config.integer("num_hidden_layers"), config.strings("mlp_layer_types")
    if types is None:
        return [index > 0 for index in range(num_layers)]
    if len(types) != num_layers or not {*types} <= {"dense", "sparse"}:
        raise config.error("mlp_layer_types", types, f"{num_layers} times 'dense' or 'sparse'")
    return [name == "sparse" for name in types]


def _read_attention(config: ConfigView, kind: LayerType, window: int | None) -> AttentionSpec:
    num_heads, head_dim = config.integer("num_attention_heads"), config.integer("head_dim")
    v_dim, num_kv_heads = config.integer("v_head_dim"), config.integer("num_key_value_heads")
    if v_dim > head_dim:
        raise config.error("v_head_dim", v_dim, f"at most head_dim ({head_dim})")
    if window is not None:
        num_kv_heads *= _KV_HEADS_WITH_WINDOW
        if config.raw("swa_num_key_value_heads") not in (None, num_kv_heads):
            given = config.raw("swa_num_key_value_heads")
            raise config.error("swa_num_key_value_heads", given, f"twice num_key_value_heads ({num_kv_heads})")
    if num_heads % num_kv_heads:
        raise config.error("num_attention_heads", num_heads, f"a multiple of the key and value heads ({num_kv_heads})")
    scale = config.nullable_number("attention_value_scale")
    ropes = config.table("rope_parameters")
    values = ropes.get(kind, {})
    if not isinstance(values, dict):
        raise config.error(f"rope_parameters.{kind}", values, "an object")
    own = {"rope_theta": config.number(_THETA[kind]), "partial_rotary_factor": config.number("partial_rotary_factor")}
    truncate = ropes.get("truncate", True)  # as in read_layer_rope
    return AttentionSpec(
        num_heads,
        num_kv_heads,
        head_dim,
        scale=head_dim**-0.5,
        rope=read_named_rope(config, f"rope_parameters.{kind}", {**own, **values, "truncate": truncate}, head_dim),
        window=window,
        has_qkv_bias=config.boolean("attention_bias"),
        has_sinks=window is not None,
        is_softmax_f32=False,
        v_dim=v_dim,
        v_scale=1.0 if scale is None else scale,
    )


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    sources = rename(spec, PRE_NORM_LAYER) | find_mixture_sources(spec, stored)
    for index, layer in enumerate(spec.layers):
        if layer.attention.has_sinks:
            sources[f"layers.{index}.sinks.weight"] = Source.of(f"layers.{index}.self_attn.attention_sink_bias")
    return sources


PAGE = FamilyPage(("MiMoV2FlashForCausalLM",), read_spec, find_sources)
