"""The language model of the mixtures of Qwen3-VL: Qwen3-MoE without a window, with experts stored as stacks of [in, out]."""

from __future__ import annotations

from collections.abc import Collection

from quire.contracts.model_spec import LayerSpec, ModelSpec, MoeSpec
from quire.model.families.blocks import assemble, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import read_moe, read_sparse_steps, transposed_experts
from quire.model.families.page import FamilyPage
from quire.model.families.qwen3 import read_normed_attention
from quire.model.families.sources import PRE_NORM_LAYER, Source, Sources, rename

MODEL_TYPE = "qwen3_vl_moe_text"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of the language model of a Qwen3-VL mixture."""
    norm, dense = read_rms_norm(config), read_mlp(config)
    attention, moe = read_normed_attention(config), read_moe(config, "moe_intermediate_size")
    layers = [
        LayerSpec(attention, moe if is_sparse else dense, attn_in=norm, mlp_in=norm) for is_sparse in read_sparse_steps(config)
    ]
    return assemble(config, layers, norm)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    sources = rename(spec, PRE_NORM_LAYER)
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mlp, MoeSpec):
            ours, block = f"layers.{index}", f"layers.{index}.mlp"
            sources[f"{ours}.router.weight"] = Source.of(f"{block}.gate.weight")
            for name in ("gate_up", "down"):
                stacks = transposed_experts(f"{block}.experts.{name}_proj", layer.mlp.num_experts)
                sources[f"{ours}.experts.{name}.weight"] = stacks
    return sources


PAGE = FamilyPage(("Qwen3VLMoeTextModel",), read_spec, find_sources)
