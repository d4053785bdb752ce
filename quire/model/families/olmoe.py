"""OLMoE (Muennighoff et al., 2024): Llama with a norm over all of q and k, and a mixture in every layer."""

from __future__ import annotations

from dataclasses import replace

from quire.base.errors import UnsupportedError
from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import qwen3_moe
from quire.model.families.blocks import assemble, read_attention, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import read_moe
from quire.model.families.page import FamilyPage

MODEL_TYPE = "olmoe"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an OLMoE model."""
    if config.raw("clip_qkv") is not None:
        raise UnsupportedError(f"clip_qkv {config.raw('clip_qkv')!r} is not supported; supported: null")
    norm = read_rms_norm(config)
    attention = read_attention(config, has_bias=config.boolean("attention_bias"))
    moe = replace(read_moe(config, "intermediate_size"), is_renormalized=config.boolean("norm_topk_prob"))
    layer = LayerSpec(replace(attention, qk_norm=norm, qk_norm_over="all"), moe, attn_in=norm, mlp_in=norm)
    return assemble(config, [layer] * config.integer("num_hidden_layers"), norm)


PAGE = FamilyPage(("OlmoeForCausalLM",), read_spec, qwen3_moe.find_sources)
