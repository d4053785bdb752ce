"""Granite mixtures (IBM): Granite with a mixture in every layer; the shared variant adds an expert for all tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec, MoeSpec
from quire.model.families import granite
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import read_moe
from quire.model.families.page import FamilyPage
from quire.model.families.sources import PRE_NORM_LAYER, Source, Sources, rename

MODEL_TYPE = "granitemoe"
SHARED_MODEL_TYPE = "granitemoeshared"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Granite mixture, shared or not."""
    return granite.assemble_scaled(config, [read_layer(config)] * config.integer("num_hidden_layers"))


def read_layer(config: ConfigView) -> LayerSpec:
    """Return a layer with a mixture."""
    # The softmax over the chosen logits is that over all, renormalised.
    moe = read_moe(config, "intermediate_size")
    if config.model_type != MODEL_TYPE and config.integer("shared_intermediate_size", minimum=0) > 0:
        moe = replace(moe, shared=replace(moe.expert, intermediate_size=config.integer("shared_intermediate_size")))
    return granite.read_layer(config, moe)


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored: experts as stacks, under names of their own or those of transformers 5.

    In GGUF files, experts are one matrix each.
    """
    sources = rename(spec, PRE_NORM_LAYER)
    for index, layer in enumerate(spec.layers):
        assert isinstance(layer.mlp, MoeSpec)
        block, ours = f"layers.{index}.block_sparse_moe", f"layers.{index}"
        if f"{block}.experts.0.gate_proj.weight" in stored:
            sources |= _find_separate(layer.mlp, ours, block)
            continue
        is_new = f"{block}.experts.gate_up_proj" in stored
        sources[f"{ours}.router.weight"] = Source.of(f"{block}.router.weight" if is_new else f"{block}.router.layer.weight")
        gate_up, down = (
            ("experts.gate_up_proj", "experts.down_proj") if is_new else ("input_linear.weight", "output_linear.weight")
        )
        sources[f"{ours}.experts.gate_up.weight"] = Source.of(f"{block}.{gate_up}")
        sources[f"{ours}.experts.down.weight"] = Source.of(f"{block}.{down}")
        if layer.mlp.shared is not None:
            inner, shared = layer.mlp.shared.intermediate_size, f"{ours}.shared_mlp"
            sources[f"{ours}.shared.gate.weight"] = Source.of(f"{shared}.input_linear.weight", (0, inner))
            sources[f"{ours}.shared.up.weight"] = Source.of(f"{shared}.input_linear.weight", (inner, 2 * inner))
            sources[f"{ours}.shared.down.weight"] = Source.of(f"{shared}.output_linear.weight")
    return sources


def _find_separate(moe: MoeSpec, ours: str, block: str) -> Sources:
    experts = [f"{block}.experts.{expert}" for expert in range(moe.num_experts)]
    pairs = [(f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight") for expert in experts]
    sources = {
        f"{ours}.router.weight": Source.of(f"{block}.router.layer.weight"),
        f"{ours}.experts.gate_up.weight": Source.stack(pairs),
        f"{ours}.experts.down.weight": Source.stack([(f"{expert}.down_proj.weight",) for expert in experts]),
    }
    if moe.shared is not None:
        names = ("gate", "up", "down")
        sources |= {f"{ours}.shared.{name}.weight": Source.of(f"{ours}.shared_mlp.{name}_proj.weight") for name in names}
    return sources


PAGE = FamilyPage(("GraniteMoeForCausalLM",), read_spec, find_sources)
SHARED_PAGE = FamilyPage(("GraniteMoeSharedForCausalLM",), read_spec, find_sources)
