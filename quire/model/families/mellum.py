"""Mellum 2 (JetBrains, 2026): Qwen3's mixture with a window on some layers, which have a rope of their own."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import qwen3_moe
from quire.model.families.blocks import (
    assemble,
    read_attention,
    read_head_dim,
    read_is_sliding,
    read_mlp,
    read_rms_norm,
    window_of,
)
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import read_moe, read_sparse_layers
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_layer_rope

MODEL_TYPE = "mellum"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Mellum 2 model."""
    norm, dense, head_dim = read_rms_norm(config), read_mlp(config), read_head_dim(config)
    moe = replace(read_moe(config, "moe_intermediate_size"), is_renormalized=config.boolean("norm_topk_prob"))
    is_sliding, is_sparse = read_is_sliding(config, lambda _: False), read_sparse_layers(config)
    rope = read_layer_rope(config, head_dim, "full_attention")
    full = replace(read_attention(config, rope, has_bias=config.boolean("attention_bias")), qk_norm=norm)
    near = replace(full, window=window_of(config, is_sliding) or None)
    near = replace(near, rope=read_layer_rope(config, head_dim, "sliding_attention"))
    layers = [
        LayerSpec(near if slides else full, moe if sparse else dense, attn_in=norm, mlp_in=norm)
        for slides, sparse in zip(is_sliding, is_sparse, strict=True)
    ]
    return assemble(config, layers, norm)


PAGE = FamilyPage(("MellumForCausalLM",), read_spec, qwen3_moe.find_sources)
