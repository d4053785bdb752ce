"""Gemma 4, text (https://huggingface.co/google/gemma-4-E2B-it): Gemma 3 with normalised values, wider heads in layers of full
attention, a learned factor on each layer's output, and, depending on the size, per-layer inputs (E2B, E4B), keys and values
shared between layers, or experts next to the feed-forward block (26B-A4B).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import cast

from quire.base.errors import UnsupportedError
from quire.contracts.model_spec import (
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    PerLayerGate,
    PerLayerInputs,
)
from quire.model.families.blocks import assemble, read_is_sliding, read_mlp, read_rms_norm, window_of
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import MixtureNames, find_mixture_sources, read_moe
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import LayerType, read_layer_rope
from quire.model.families.sources import SANDWICH_LAYER, TOP, Source, Sources, rename
from quire.model.parameters import parameter_shapes

MODEL_TYPE = "gemma4_text"
UNIFIED_MODEL_TYPE = "gemma4_unified_text"
"""Of the 12B, whose images and sounds have no encoders: a dense model without per-layer inputs."""
SPARE = re.compile(r"layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight")
"""What checkpoints may store for layers that read the keys and values of another one."""
PER_LAYER_TOP = TOP | {
    "per_layer_embed": "embed_tokens_per_layer",
    "per_layer_proj": "per_layer_model_projection",
    "per_layer_norm": "per_layer_projection_norm",
}
PER_LAYER_LAYER = SANDWICH_LAYER | {
    "per_layer.gate": "per_layer_input_gate",
    "per_layer.up": "per_layer_projection",
    "per_layer.norm": "post_per_layer_input_norm",
}
_LAYER = PER_LAYER_LAYER | {
    "router": "router.proj",
    "shared.gate": "mlp.gate_proj",
    "shared.up": "mlp.up_proj",
    "shared.down": "mlp.down_proj",
    "shared_out": "post_feedforward_layernorm_1",
    "experts_in": "pre_feedforward_layernorm_2",
    "experts_out": "post_feedforward_layernorm_2",
}
_SEPARATE_EXPERT = re.compile(r"layers\.\d+\.moe\.experts\.0\.gate_proj\.weight")
_WITHOUT_KIND = {
    "layer_scale.weight": "layer_scalar",
    "router_in.weight": "router.scale",
    "expert_scale.weight": "router.per_expert_scale",
    "experts.gate_up.weight": "experts.gate_up_proj",
    "experts.down.weight": "experts.down_proj",
}
"""Parameters that are stored under the name of their module."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Gemma 4 text model."""
    config.refuse_other("use_bidirectional_attention", "vision")  # which means tokens of images only
    norm, mlp = read_rms_norm(config, late_cast=True), read_mlp(config, "hidden_activation")
    inputs = read_per_layer_inputs(config, norm)
    gate = None if inputs is None else PerLayerGate(inputs.size, mlp.activation, norm)
    is_sliding = read_is_sliding(config, lambda index: (index + 1) % 6 != 0)
    is_sliding[-1] = False  # whatever the config says, as in transformers
    kv_sources, sizes = read_kv_sources(config, is_sliding), _read_sizes(config, is_sliding)
    layers = []
    for slides, source, size in zip(is_sliding, kv_sources, sizes, strict=True):
        is_wide = config.boolean("use_double_wide_mlp") and source is not None
        block = replace(mlp, intermediate_size=2 * mlp.intermediate_size) if is_wide else mlp
        attention = replace(_read_attention(config, slides, size, norm), kv_source=source)
        feed_forward = _read_moe(config, block, norm) if config.boolean("enable_moe_block") else block
        layers.append(LayerSpec(attention, feed_forward, norm, norm, norm, norm, per_layer_gate=gate, has_scale=True))
    return assemble(
        config,
        layers,
        norm,
        has_own_layer_types=True,
        max_positions=config.integer("max_position_embeddings"),
        embed_scale=config.integer("hidden_size") ** 0.5,
        is_embed_scale_cast=True,
        final_softcap=config.nullable_number("final_logit_softcapping"),
        per_layer_inputs=inputs,
    )


def read_per_layer_inputs(config: ConfigView, norm: NormSpec, is_scale_cast: bool = False) -> PerLayerInputs | None:
    """Return the per-layer inputs of a model; None where their size is 0."""
    size = config.nullable_integer("hidden_size_per_layer_input", minimum=0)
    return PerLayerInputs(config.integer("vocab_size_per_layer_input"), size, norm, is_scale_cast) if size else None


def read_kv_sources(config: ConfigView, is_sliding: list[bool]) -> list[int | None]:
    """Return for each layer the layer whose keys and values it reads: the last of its kind before the `num_kv_shared_layers`
    last ones; None for those that have their own."""
    num_shared = config.integer("num_kv_shared_layers", minimum=0)
    first = len(is_sliding) - num_shared
    own = {is_sliding[index]: index for index in range(max(first, 0))}
    if not set(is_sliding[max(first, 0) :]) <= own.keys():
        raise config.error(
            "num_kv_shared_layers",
            num_shared,
            f"such that a layer of each kind of the last ones is among the others before {first}",
        )
    return [None if index < first else own[slides] for index, slides in enumerate(is_sliding)]


def _read_sizes(config: ConfigView, is_sliding: list[bool]) -> list[tuple[int, int]]:
    """Return (head_dim, num_key_value_heads) of each layer: `per_layer_config` says it where there is one."""
    plain = config.integer("head_dim"), config.integer("num_key_value_heads")
    full = config.integer("global_head_dim"), plain[1]
    global_heads = config.nullable_integer("num_global_key_value_heads")
    if config.boolean("attention_k_eq_v") and global_heads is not None:
        full = full[0], global_heads
    if not config.has("per_layer_config"):
        return [plain if slides else full for slides in is_sliding]
    table, sizes = config.table("per_layer_config"), [plain] * len(is_sliding)
    for key, values in table.items():
        if not key.isdecimal() or int(key) >= len(sizes) or not isinstance(values, dict):
            raise config.error("per_layer_config", {key: values}, f"an object for each of some layers, 0 to {len(sizes) - 1}")
        sizes[int(key)] = _read_override(config, f"per_layer_config.{key}", values, plain)
    return sizes


def _read_override(config: ConfigView, name: str, values: Mapping[str, object], plain: tuple[int, int]) -> tuple[int, int]:
    keys = ("head_dim", "num_key_value_heads")
    if not values.keys() <= set(keys):
        raise UnsupportedError(
            f"{name} {sorted(values)} is not supported in a {config.model_type!r} model; supported: {', '.join(keys)}"
        )
    found = [values.get(key, default) for key, default in zip(keys, plain, strict=True)]
    if not all(type(value) is int and value >= 1 for value in found):
        raise config.error(name, values, "an object of integers >= 1")
    return cast("tuple[int, int]", tuple(found))


def _read_attention(config: ConfigView, slides: bool, size: tuple[int, int], norm: NormSpec) -> AttentionSpec:
    head_dim, num_kv_heads = size
    num_heads, has_bias = config.integer("num_attention_heads"), config.boolean("attention_bias")
    if num_heads % num_kv_heads:
        raise config.error(
            "num_attention_heads", num_heads, f"a multiple of the key and value heads of a layer ({num_kv_heads})"
        )
    kind: LayerType = "sliding_attention" if slides else "full_attention"
    return AttentionSpec(
        num_heads,
        num_kv_heads,
        head_dim,
        scale=1.0,
        rope=read_layer_rope(config, head_dim, kind),
        window=window_of(config, [True]) if slides else None,
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
        qk_norm=norm,
        v_norm=replace(norm, has_weight=False),
        is_v_from_k=config.boolean("attention_k_eq_v") and not slides,
    )


def _read_moe(config: ConfigView, mlp: MlpSpec, norm: NormSpec) -> MoeSpec:
    """Return the experts, next to which stands the feed-forward block of the other models."""
    moe = read_moe(
        config, "moe_intermediate_size", counts=("num_experts",), top_k="top_k_experts", activation="hidden_activation"
    )
    return replace(moe, is_weight_f32=True, shared=mlp, branch_norm=norm, has_expert_scale=True)


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored; in GGUF files, experts are one matrix each."""
    sources = rename(spec, _LAYER, PER_LAYER_TOP)
    for name in parameter_shapes(spec):
        module = name.removeprefix("layers.").partition(".")[2]
        if name.startswith("layers.") and module in _WITHOUT_KIND:
            sources[name] = Source.of(name.removesuffix(module) + _WITHOUT_KIND[module])
    if any(_SEPARATE_EXPERT.fullmatch(name) for name in stored):
        found = find_mixture_sources(spec, stored, MixtureNames(block="moe"))
        sources |= {name: source for name, source in found.items() if ".experts." in name}
    return sources


PAGE = FamilyPage(("Gemma4ForCausalLM",), read_spec, find_sources, spare=SPARE)
UNIFIED_PAGE = FamilyPage(("Gemma4UnifiedForCausalLM",), read_spec, find_sources, spare=SPARE)
