"""BLOOM (BigScience, 2022): LayerNorm, also of the embeddings, biases everywhere, and ALiBi."""

from __future__ import annotations

from collections.abc import Collection

from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from quire.model.families import gpt_neox
from quire.model.families.blocks import alibi_slopes, assemble, read_layer_norm, read_sizes
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Sources

MODEL_TYPE = "bloom"
_TOP = {
    "embed": "word_embeddings",
    "embed_norm": "word_embeddings_layernorm",
    "final_norm": "ln_f",
    "lm_head": "lm_head",
}
_LAYER = {**gpt_neox.LAYER, "o": "self_attention.dense"}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a BLOOM model."""
    config.refuse_other("apply_residual_connection_post_layernorm", False)
    hidden_size, num_heads, head_dim = read_sizes(config, ("hidden_size", "n_embed"), ("n_head", "num_attention_heads"))
    norm, slopes = read_layer_norm(config, "layer_norm_epsilon"), alibi_slopes(num_heads)
    attention = AttentionSpec(
        num_heads, num_heads, head_dim, head_dim**-0.5, has_qkv_bias=True, has_o_bias=True, alibi_slopes=slopes
    )
    mlp = MlpSpec(4 * hidden_size, "gelu_tanh", is_gated=False, has_bias=True)
    layers = [LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm)] * config.integer("n_layer", "num_hidden_layers")
    return assemble(config, layers, norm, hidden_size=hidden_size, embed_norm=norm, max_positions=config.integer("seq_length"))


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return gpt_neox.find_joined_sources(spec, _LAYER, _TOP, "self_attention", "h")


PAGE = FamilyPage(("BloomForCausalLM",), read_spec, find_sources, prefixes=("transformer.",))
