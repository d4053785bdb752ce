"""Gemma 3n, text (https://huggingface.co/google/gemma-3n-E2B-it): several residual streams with alternating updates, a residual
of low rank beside attention, per-layer inputs, keys and values shared between layers, and sparse activations in the first ones.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import AltUpSpec, LaurelSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, PerLayerGate
from quire.model.families.blocks import (
    assemble,
    read_activation,
    read_attention,
    read_head_dim,
    read_is_sliding,
    read_rms_norm,
    window_of,
)
from quire.model.families.config_view import ConfigView, is_number
from quire.model.families.gemma4 import PER_LAYER_LAYER, PER_LAYER_TOP, SPARE, read_kv_sources, read_per_layer_inputs
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_layer_rope
from quire.model.families.sources import Source, Sources, rename

MODEL_TYPE = "gemma3n_text"
_LAYER = PER_LAYER_LAYER | {
    "altup.predict": "altup.prediction_coefs",
    "altup.correct": "altup.correction_coefs",
    "altup.router": "altup.modality_router",
    "altup.norm": "altup.router_norm",
    "laurel.left": "laurel.linear_left",
    "laurel.right": "laurel.linear_right",
    "laurel.norm": "laurel.post_laurel_norm",
}
_SPARE = re.compile(rf"{SPARE.pattern}|layers\.\d+\.altup\.correct_output_scale")
"""The scale is stored also where the config says that it is not used."""
_DEFAULT_SPARSITY, _NUM_SPARSE = 0.95, 10
"""Of the first layers of a model that has more, where the config does not say it."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Gemma 3n text model."""
    norm = read_rms_norm(config, late_cast=True)
    inputs = read_per_layer_inputs(config, norm, is_scale_cast=True)
    if inputs is None:
        raise config.error("hidden_size_per_layer_input", 0, "an integer >= 1 in a Gemma 3n model")
    is_sliding, head_dim = read_is_sliding(config, lambda index: (index + 1) % 5 != 0), read_head_dim(config)
    full = replace(
        read_attention(config, read_layer_rope(config, head_dim, "full_attention"), config.boolean("attention_bias")),
        scale=1.0,
        qk_norm=norm,
        v_norm=replace(norm, has_weight=False),
    )
    sliding = replace(
        full, window=window_of(config, is_sliding) or None, rope=read_layer_rope(config, head_dim, "sliding_attention")
    )
    mlps, sources = _read_mlps(config), read_kv_sources(config, is_sliding)
    laurel, altup = LaurelSpec(config.integer("laurel_rank"), norm), _read_altup(config, norm)
    gate = PerLayerGate(inputs.size, mlps[0].activation, norm)
    layers = [
        LayerSpec(
            replace(sliding if slides else full, kv_source=source),
            mlp,
            *(norm, norm, norm, norm),
            per_layer_gate=gate,
            laurel=laurel,
            altup=altup,
        )
        for slides, source, mlp in zip(is_sliding, sources, mlps, strict=True)
    ]
    return assemble(
        config,
        layers,
        norm,
        max_positions=config.integer("max_position_embeddings"),
        embed_scale=config.integer("hidden_size") ** 0.5,
        is_embed_scale_cast=True,
        final_softcap=config.nullable_number("final_logit_softcapping"),
        per_layer_inputs=inputs,
    )


def _read_altup(config: ConfigView, norm: NormSpec) -> AltUpSpec:
    count, active = config.integer("altup_num_inputs", minimum=2), config.integer("altup_active_idx", minimum=0)
    if active >= count:
        raise config.error("altup_active_idx", active, f"below altup_num_inputs ({count})")
    return AltUpSpec(count, active, norm, config.boolean("altup_correct_scale"))


def _read_mlps(config: ConfigView) -> list[MlpSpec]:
    """Return the feed-forward block of each layer: sizes and sparsities may be lists."""
    num_layers, activation = config.integer("num_hidden_layers"), read_activation(config, "hidden_activation")
    sizes = config.integers("intermediate_size")
    sizes = sizes * num_layers if len(sizes) == 1 else sizes
    if len(sizes) != num_layers or 0 in sizes:
        raise config.error("intermediate_size", sizes, f"an integer >= 1 or a list of {num_layers} of them")
    sparsities = config.raw("activation_sparsity_pattern")
    if sparsities is None:
        num_sparse = _NUM_SPARSE if num_layers > _NUM_SPARSE else 0
        sparsities = [_DEFAULT_SPARSITY] * num_sparse + [0.0] * (num_layers - num_sparse)
    is_list = isinstance(sparsities, list) and len(sparsities) == num_layers
    if not is_list or not all(is_number(share) and 0 <= share < 1 for share in sparsities):
        raise config.error("activation_sparsity_pattern", sparsities, f"a list of {num_layers} numbers from 0 to below 1")
    return [MlpSpec(size, activation, sparsity=float(share)) for size, share in zip(sizes, sparsities, strict=True)]


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    sources = rename(spec, _LAYER, PER_LAYER_TOP)
    for index, layer in enumerate(spec.layers):
        if layer.altup is not None and layer.altup.has_scale:
            sources[f"layers.{index}.altup.scale.weight"] = Source.of(f"layers.{index}.altup.correct_output_scale")
    if spec.altup is not None:
        others = range(spec.altup.num_streams - 1)
        for name, stored in (("split", "altup_projections"), ("join", "altup_unembed_projections")):
            sources[f"altup_{name}.weight"] = Source.stack([(f"{stored}.{index}.weight",) for index in others])
    return sources


PAGE = FamilyPage(("Gemma3nForCausalLM",), read_spec, find_sources, spare=_SPARE)
