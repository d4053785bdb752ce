"""Which part of a layer a native layer of a tensor-parallel rank is."""

from __future__ import annotations

from typing import Any

from quire.contracts.model_spec import LayerSpec, MoeSpec
from quire.model.tensor_shards import LayerShard
from quire.parallel.shards import ShardRange


def attention_rows(spec: LayerSpec, shard: LayerShard | None) -> dict[str, ShardRange]:
    """Return the rows of q, k, v and o that a rank has."""
    if shard is None:
        return {}
    dim, own = spec.attention.head_dim, shard.heads.heads
    sizes = (own, dim), (shard.heads.kv_heads, dim), (shard.heads.kv_heads, spec.attention.value_size)
    heads, keys, values = (ShardRange(part.start * size, part.stop * size) for part, size in sizes)
    return {
        "q": heads,
        "attn_gate": own if spec.attention.has_head_gate else heads,
        "k": keys,
        "v": values,
        "o": shard.o_outputs,
    }


def set_shard(layer: Any, spec: LayerSpec, shard: LayerShard) -> None:
    """Set in a native layer which part of the model's layer it is."""
    attention, heads, kv_heads = spec.attention, shard.heads.heads, shard.heads.kv_heads
    layer.num_heads, layer.num_kv_heads = heads.size, kv_heads.size
    layer.first_head, layer.first_kv_head = heads.start, kv_heads.start
    layer.total_heads, layer.total_kv_heads = attention.num_heads, attention.num_kv_heads
    layer.first_inner, layer.first_output = shard.inner.start, shard.outputs.start
    layer.first_o_output, layer.first_expert_output = shard.o_outputs.start, shard.expert_outputs.start
    if shard.context is not None:
        heads, kv_heads = shard.context.heads, shard.context.kv_heads
        layer.first_context_head, layer.num_context_heads = heads.start, heads.size
        layer.first_context_kv_head, layer.num_context_kv_heads = kv_heads.start, kv_heads.size
        layer.writes_kv_heads = shard.writes_kv_heads
    if not isinstance(spec.mlp, MoeSpec):
        layer.total_inner = spec.mlp.intermediate_size
        return
    layer.total_inner = spec.mlp.expert.intermediate_size
    if spec.mlp.shared is not None:
        layer.first_shared_inner, layer.total_shared_inner = shard.shared_inner.start, spec.mlp.shared.intermediate_size
