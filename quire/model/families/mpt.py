"""MPT (MosaicML, 2023): LayerNorm, no biases at all, perhaps clipped projections, and ALiBi."""

from __future__ import annotations

from collections.abc import Collection

from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from quire.model.families.blocks import alibi_slopes, assemble, read_layer_norm, read_sizes
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Sources, join_qkv, rename

MODEL_TYPE = "mpt"
_TOP = {"embed": "wte", "final_norm": "norm_f", "lm_head": "lm_head"}
_LAYER = {"attn_in": "norm_1", "mlp_in": "norm_2", "o": "attn.out_proj", "up": "ffn.up_proj", "down": "ffn.down_proj"}
_SUPPORTED = {"alibi": True, "attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False}
"""Options of attention, each with the value that is supported, which is that of an absent one."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an MPT model."""
    options = config.nested("attn_config")
    for name, value in _SUPPORTED.items():
        options.refuse_other(name, value)
    for name, value in (("logit_scale", None), ("emb_scale", None), ("no_bias", True)):
        config.refuse_other(name, value)
    hidden_size, num_heads, head_dim = read_sizes(config, ("d_model", "hidden_size"), ("n_heads", "num_attention_heads"))
    attention = AttentionSpec(
        num_heads,
        num_heads,
        head_dim,
        options.nullable_number("softmax_scale") or head_dim**-0.5,
        clip_qkv=options.nullable_number("clip_qkv"),
        alibi_slopes=alibi_slopes(num_heads, options.nullable_number("alibi_bias_max") or 8.0),
    )
    norm = read_layer_norm(config, "layer_norm_epsilon", has_bias=False)
    mlp = MlpSpec(config.integer("expansion_ratio") * hidden_size, "gelu", is_gated=False)
    layers = [LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm)] * config.integer("n_layers", "num_hidden_layers")
    return assemble(config, layers, norm, hidden_size=hidden_size, max_positions=config.integer("max_seq_len"))


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored: rows of Wqkv are q, k, v."""
    sources = rename(spec, _LAYER, _TOP, layers="blocks")
    join_qkv(sources, spec, "blocks.{}.attn.Wqkv")
    return sources


PAGE = FamilyPage(("MptForCausalLM", "MPTForCausalLM"), read_spec, find_sources, prefixes=("transformer.",))
