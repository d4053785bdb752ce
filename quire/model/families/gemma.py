"""Gemma (2024): Llama with GeGLU, norms that store weight - 1, scaled embeddings and a tied head."""

from __future__ import annotations

from quire.contracts.model_spec import LayerSpec, MlpSpec, ModelSpec
from quire.model.families import llama
from quire.model.families.blocks import assemble, read_attention, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage

MODEL_TYPE = "gemma"


def read_gemma_mlp(config: ConfigView) -> MlpSpec:
    """Return the feed-forward block; the first configs say "gelu" and mean its tanh approximation."""
    if config.raw("hidden_act") == "gelu":
        return MlpSpec(config.integer("intermediate_size"), "gelu_tanh")
    return read_mlp(config)


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Gemma model."""
    norm = read_rms_norm(config, offset=1, late_cast=True)
    attention = read_attention(config, has_bias=config.boolean("attention_bias"))
    layer = LayerSpec(attention, read_gemma_mlp(config), attn_in=norm, mlp_in=norm)
    scale = config.integer("hidden_size") ** 0.5
    layers = [layer] * config.integer("num_hidden_layers")
    return assemble(config, layers, norm, embed_scale=scale, is_embed_scale_cast=True)


PAGE = FamilyPage(("GemmaForCausalLM",), read_spec, llama.find_sources)
