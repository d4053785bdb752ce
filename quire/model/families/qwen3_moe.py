"""Qwen3 mixture of experts. head_dim absent is hidden_size / num_attention_heads, unlike in the dense Qwen3."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, MlpSpec, ModelSpec, MoeSpec
from quire.model.families.blocks import assemble, read_activation, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.qwen2 import read_window
from quire.model.families.qwen3 import read_normed_attention
from quire.model.families.sources import PRE_NORM_LAYER, Source, Sources, rename

MODEL_TYPE = "qwen3_moe"


def read_moe(config: ConfigView, inner: str) -> MoeSpec:
    """Return a mixture of experts of the intermediate size under key `inner`; renormalised weights."""
    num_experts = config.integer("num_local_experts", "num_experts", "n_routed_experts")
    top_k = config.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise config.error("num_experts_per_tok", top_k, f"at most the number of experts ({num_experts})")
    return MoeSpec(num_experts, top_k, MlpSpec(config.integer(inner), read_activation(config)))


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Qwen3-MoE model."""
    norm, dense = read_rms_norm(config), read_mlp(config)
    attention = replace(read_normed_attention(config), window=read_window(config))
    moe = replace(read_moe(config, "moe_intermediate_size"), is_renormalized=config.boolean("norm_topk_prob"))
    dense_layers, step = config.integers("mlp_only_layers"), config.integer("decoder_sparse_step")
    is_sparse = [index not in dense_layers and (index + 1) % step == 0 for index in range(config.integer("num_hidden_layers"))]
    layers = [LayerSpec(attention, moe if sparse else dense, attn_in=norm, mlp_in=norm) for sparse in is_sparse]
    return assemble(config, layers, norm)


def find_expert_sources(spec: ModelSpec, stored: Collection[str], block: str, names: tuple[str, str, str]) -> Sources:
    """Return sources of routers and experts.

    stored  names in the checkpoint: transformers 5 may write all experts in one tensor, which is then the canonical one
    block   module below the layer that holds router (`gate`) and `experts`
    names   modules of an expert: gate, up, down
    """
    gate, up, down = names
    sources: Sources = {}
    for index, layer in enumerate(spec.layers):
        if not isinstance(layer.mlp, MoeSpec):
            continue
        prefix = f"layers.{index}.{block}"
        experts = [f"{prefix}.experts.{expert}" for expert in range(layer.mlp.num_experts)]
        gate_up = Source.stack([(f"{expert}.{gate}.weight", f"{expert}.{up}.weight") for expert in experts])
        down_rows = Source.stack([(f"{expert}.{down}.weight",) for expert in experts])
        if f"{prefix}.experts.gate_up_proj" in stored:
            gate_up, down_rows = Source.of(f"{prefix}.experts.gate_up_proj"), Source.of(f"{prefix}.experts.down_proj")
        sources[f"layers.{index}.router.weight"] = Source.of(f"{prefix}.gate.weight")
        sources[f"layers.{index}.experts.gate_up.weight"] = gate_up
        sources[f"layers.{index}.experts.down.weight"] = down_rows
    return sources


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    experts = find_expert_sources(spec, stored, "mlp", ("gate_proj", "up_proj", "down_proj"))
    return rename(spec, PRE_NORM_LAYER) | experts


PAGE = FamilyPage(("Qwen3MoeForCausalLM",), read_spec, find_sources)
