"""Granite 4 (IBM, 2025): Mamba 2 and attention, with Granite's multipliers; with experts and a shared one, or dense."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import NO_ATTENTION, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from quire.model.families import granitemoe
from quire.model.families.bamba import read_expanded_mixer
from quire.model.families.blocks import assemble, read_activation, read_attention, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.layer_kinds import read_layer_kinds
from quire.model.families.mamba_blocks import MAMBA2_NAMES, mixer_sources
from quire.model.families.mixtures import read_moe
from quire.model.families.page import FamilyPage
from quire.model.families.sources import PRE_NORM_LAYER, Source, Sources, rename
from quire.model.parameters import parameter_shapes

MODEL_TYPE = "granitemoehybrid"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Granite 4 model; without experts its feed-forward block is the shared one."""
    norm, mlp = read_rms_norm(config), _read_mlp(config)
    attention = replace(
        read_attention(config, has_bias=config.boolean("attention_bias")), scale=config.number("attention_multiplier")
    )
    if config.raw("position_embedding_type") != "rope":
        attention = replace(attention, rope=None)
    mixer, scale = read_expanded_mixer(config), config.number("residual_multiplier")
    kinds = read_layer_kinds(config, "linear_attention", lambda _: True)
    layers = [
        LayerSpec(NO_ATTENTION, mlp, attn_in=norm, mlp_in=norm, residual_scale=scale, mixer=mixer)
        if is_recurrent
        else LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm, residual_scale=scale)
        for is_recurrent in kinds
    ]
    return assemble(
        config,
        layers,
        norm,
        has_own_layer_types=True,
        embed_scale=config.number("embedding_multiplier"),
        logit_scale=1 / config.number("logits_scaling"),
    )


def _read_mlp(config: ConfigView) -> MlpSpec | MoeSpec:
    shared = MlpSpec(config.integer("shared_intermediate_size"), read_activation(config))
    if config.integer("num_local_experts", minimum=0) == 0:
        return shared
    # The softmax over the chosen logits is that over all, renormalised.
    return replace(read_moe(config, "intermediate_size", counts=("num_local_experts",)), shared=shared)


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    mixers = mixer_sources(spec, parameter_shapes(spec), MAMBA2_NAMES, "mamba")
    if any(isinstance(layer.mlp, MoeSpec) for layer in spec.layers):
        return granitemoe.find_sources(spec, stored) | mixers
    sources = rename(spec, PRE_NORM_LAYER) | mixers
    for index, layer in enumerate(spec.layers):
        assert isinstance(layer.mlp, MlpSpec)
        inner, ours = layer.mlp.intermediate_size, f"layers.{index}"
        if f"{ours}.shared_mlp.input_linear.weight" not in stored:  # in a GGUF file the matrices are apart
            continue
        sources[f"{ours}.gate.weight"] = Source.of(f"{ours}.shared_mlp.input_linear.weight", (0, inner))
        sources[f"{ours}.up.weight"] = Source.of(f"{ours}.shared_mlp.input_linear.weight", (inner, 2 * inner))
        sources[f"{ours}.down.weight"] = Source.of(f"{ours}.shared_mlp.output_linear.weight")
    return sources


PAGE = FamilyPage(("GraniteMoeHybridForCausalLM",), read_spec, find_sources)
