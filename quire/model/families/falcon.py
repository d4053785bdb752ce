"""Falcon 7B, 40B and 11B (TII, 2023): parallel blocks, few heads of keys and values, q, k, v of each group together;
Falcon-RW has ALiBi of 8 bits, and runs by torch on a CPU."""

from __future__ import annotations

from collections.abc import Collection

from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from quire.model.families.blocks import alibi_slopes, read_activation, read_head_dim, read_layer_norm, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import Sources, join_qkv, rename

MODEL_TYPE = "falcon"
_TOP = {"embed": "word_embeddings", "final_norm": "ln_f", "lm_head": "lm_head"}
_LAYER = {
    "attn_in": "input_layernorm",
    "mlp_in": "post_attention_layernorm",
    "o": "self_attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
_JOINED = "h.0.self_attention.qkv"
"""In GGUF files the rows of all queries are followed by those of all keys and all values."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Falcon model."""
    is_new, has_bias, norm = (
        config.boolean("new_decoder_architecture"),
        config.boolean("bias"),
        read_layer_norm(config, "layer_norm_epsilon"),
    )
    num_heads, head_dim, inner = (
        config.integer("num_attention_heads"),
        read_head_dim(config),
        config.nullable_integer("ffn_hidden_size"),
    )
    num_kv_heads, has_alibi = config.nullable_integer("num_kv_heads") or num_heads, config.boolean("alibi")
    if not is_new and config.boolean("multi_query"):
        num_kv_heads = 1
    if num_heads % num_kv_heads:
        raise config.error("num_kv_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
    attention = AttentionSpec(
        num_heads,
        num_kv_heads,
        head_dim,
        head_dim**-0.5,
        None if has_alibi else read_rope(config, head_dim),
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
        alibi_slopes=alibi_slopes(num_heads) if has_alibi else (),
        alibi_scale=head_dim**-0.5 if has_alibi else None,
        is_softmax_f32=False,
    )
    inner = 4 * config.integer("hidden_size") if inner is None else inner
    mlp = MlpSpec(inner, read_activation(config, "activation"), is_gated=False, has_bias=has_bias)
    num_norms = config.nullable_integer("num_ln_in_parallel_attn") or 2
    is_parallel = config.boolean("parallel_attn")
    if is_new and not is_parallel:
        raise config.error("parallel_attn", False, "true where new_decoder_architecture is")
    has_mlp_norm = num_norms == 2 if is_new else not is_parallel
    layer = LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm if has_mlp_norm else None, is_parallel=is_parallel)
    return repeat_layer(config, layer, norm)


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored: rows of query_key_value are q, k and v of the first group of heads, then of the
    next."""
    has_two, is_joined = spec.layers[0].is_parallel and spec.layers[0].mlp_in is not None, f"{_JOINED}.weight" in stored
    names = {**_LAYER, "attn_in": "ln_attn", "mlp_in": "input_layernorm" if is_joined else "ln_mlp"} if has_two else _LAYER
    sources = rename(spec, names, _TOP, layers="h")
    join_qkv(sources, spec, f"h.{{}}.self_attention.{'qkv' if is_joined else 'query_key_value'}", by_group=not is_joined)
    return sources


PAGE = FamilyPage(("FalconForCausalLM", "RWForCausalLM"), read_spec, find_sources, prefixes=("transformer.",))
