"""DBRX (Databricks, 2024): a mixture of fused experts in every layer, LayerNorm without biases, and clipped projections."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec, MoeSpec, NormSpec
from quire.model.families.blocks import assemble, read_attention
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import read_moe
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Piece, Source, Sources, join_qkv, rename

MODEL_TYPE = "dbrx"
_DEFAULT_THETA = 10000.0
_KEYS = {
    **{"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"},
    "max_seq_len": "max_position_embeddings",
}
_TOP = {"embed": "wte", "final_norm": "norm_f", "lm_head": "lm_head"}
_LAYER = {
    **{"attn_in": "norm_attn_norm.norm_1", "mlp_in": "norm_attn_norm.norm_2", "o": "norm_attn_norm.attn.out_proj"},
    "router": "ffn.router.layer",
}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a DBRX model."""
    config = config.renamed(_KEYS)
    options, feed_forward = config.nested("attn_config"), config.nested("ffn_config")
    attention = read_attention(config)
    num_kv_heads = options.integer("kv_n_heads")
    if attention.num_heads % num_kv_heads:
        raise options.error("kv_n_heads", num_kv_heads, f"a divisor of n_heads ({attention.num_heads})")
    attention = replace(attention, num_kv_heads=num_kv_heads, clip_qkv=options.nullable_number("clip_qkv"))
    if options.has("rope_theta") and attention.rope is not None:
        # Files that transformers 5 has saved have its default outside of attn_config, which the model was not trained with.
        theta = options.number("rope_theta")
        if attention.rope.theta not in (theta, _DEFAULT_THETA):
            raise options.error("rope_theta", theta, f"that of rope_parameters ({attention.rope.theta:g})")
        attention = replace(attention, rope=replace(attention.rope, theta=theta))
    moe = read_moe(feed_forward, "ffn_hidden_size", ("moe_num_experts",), "moe_top_k")
    feed_forward.nested("ffn_act_fn").refuse_other("name", "silu")
    order = feed_forward.nullable_number("moe_normalize_expert_weights")
    if order not in (None, 1):
        raise feed_forward.error("moe_normalize_expert_weights", order, "1 or null")
    moe, norm = replace(moe, is_renormalized=order == 1, is_score_f32=False), NormSpec("layer", 1e-5)
    layer = LayerSpec(attention, moe, attn_in=norm, mlp_in=norm)
    return assemble(config, [layer] * config.integer("num_hidden_layers"), norm)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored: w1, v1 and w2 have the rows of all experts, w2 transposed."""
    sources = rename(spec, _LAYER, _TOP, layers="blocks")
    join_qkv(sources, spec, "blocks.{}.norm_attn_norm.attn.Wqkv")
    for index, layer in enumerate(spec.layers):
        assert isinstance(layer.mlp, MoeSpec)
        count, name = layer.mlp.num_experts, f"blocks.{index}.ffn.experts.mlp"
        sources[f"layers.{index}.experts.gate_up.weight"] = Source.stack_pieces(
            [tuple(Piece(f"{name}.{one}", entry=i, num_entries=count) for one in ("w1", "v1")) for i in range(count)]
        )
        sources[f"layers.{index}.experts.down.weight"] = Source.stack_pieces(
            [(Piece(f"{name}.w2", is_transposed=True, entry=i, num_entries=count),) for i in range(count)]
        )
    return sources


PAGE = FamilyPage(("DbrxForCausalLM",), read_spec, find_sources, prefixes=("transformer.",))
