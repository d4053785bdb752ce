"""ModelShard: which rows of which weight a tensor-parallel rank has.

Every weight is sharded by its outputs, so that a rank computes whole sums over all inputs and nothing is summed across ranks:
results are gathered, and have the same bits for any number of ranks. This is the column-parallel half of Megatron-LM
(https://arxiv.org/abs/1909.08053), applied to every weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.contracts.kv_spec import KvDtype, KvSpec
from quire.contracts.model_spec import LayerSpec, ModelSpec, MoeSpec
from quire.model.parameters import Shape
from quire.parallel.shards import OUTPUT_MULTIPLE, HeadRange, ShardRange, head_range, shard_range


@dataclass(frozen=True, slots=True)
class LayerShard:
    """The part of a layer that a rank has.

    heads    its query heads, and the key and value heads that they read
    inner    its intermediate columns of the feed-forward block, or of every expert
    shared_inner  the same of the shared expert
    outputs  its columns of the residual stream: rows of o and down
    total_heads, total_kv_heads  of all ranks together
    """

    heads: HeadRange
    inner: ShardRange
    shared_inner: ShardRange
    outputs: ShardRange
    total_heads: int
    total_kv_heads: int

    @classmethod
    def of(cls, layer: LayerSpec, hidden_size: int, rank: int, shares: Sequence[float]) -> LayerShard:
        """Return the part of a rank."""
        attention = layer.attention
        return cls(
            head_range(attention.num_heads, attention.num_kv_heads, rank, shares),
            _output_range(_inner_size(layer), rank, shares),
            _output_range(_shared_inner_size(layer), rank, shares),
            _output_range(hidden_size, rank, shares),
            attention.num_heads,
            attention.num_kv_heads,
        )


def _inner_size(layer: LayerSpec) -> int:
    return layer.mlp.expert.intermediate_size if isinstance(layer.mlp, MoeSpec) else layer.mlp.intermediate_size


def _shared_inner_size(layer: LayerSpec) -> int:
    shared = layer.mlp.shared if isinstance(layer.mlp, MoeSpec) else None
    return _inner_size(layer) if shared is None else shared.intermediate_size


def _output_range(total: int, rank: int, shares: Sequence[float]) -> ShardRange:
    """Return the outputs of a rank: whole panels of the kernels if there are enough; results do not depend on this."""
    return shard_range(total, rank, shares, OUTPUT_MULTIPLE if total >= OUTPUT_MULTIPLE * len(shares) else 1)


@dataclass(frozen=True, slots=True)
class ModelShard:
    """The part of a model that a rank has; norms, routers, positions and the projections to latent rows are replicated on every
    rank.

    vocabulary  its rows of the embedding and of the LM head
    """

    rank: int
    size: int
    vocabulary: ShardRange
    layers: tuple[LayerShard, ...]

    @classmethod
    def of(cls, spec: ModelSpec, rank: int, shares: Sequence[float]) -> ModelShard:
        """Return the part of a rank, where rank r has shares[r] of the sum of `shares`.

        Raises ConfigError if a rank would have no part of a weight.
        """
        if any(layer.attention.latent is not None and layer.attention.latent.indexer is not None for layer in spec.layers):
            raise ConfigError(
                f"tensor_parallel_size is {len(shares)}, but an indexer of keys ({spec.model_type}) runs on one rank"
            )
        if spec.per_layer_inputs is not None or any(layer.attention.kv_source is not None for layer in spec.layers):
            raise ConfigError(
                f"tensor_parallel_size is {len(shares)}, but per-layer inputs and layers that read the keys and values of "
                f"another layer ({spec.model_type}) run on one rank"
            )
        layers = tuple(LayerShard.of(layer, spec.hidden_size, rank, shares) for layer in spec.layers)
        found = cls(rank, len(shares), _output_range(spec.vocab_size, rank, shares), layers)
        least = min(
            spec.vocab_size, spec.hidden_size, *(min(_inner_size(layer), _shared_inner_size(layer)) for layer in spec.layers)
        )
        if least < len(shares):
            raise ConfigError(f"tensor_parallel_size must be at most {least} for this model, got {len(shares)}")
        return found

    def parameter_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return the shapes of the rank's part of parameters, given the whole ones by their canonical names."""
        return {name: self._shape(name, shape) for name, shape in shapes.items()}

    def _shape(self, name: str, shape: Shape) -> Shape:
        if name.startswith(("embed.", "lm_head.")):
            return (self.vocabulary.size, *shape[1:])
        if not name.startswith("layers."):
            return shape
        _, index, *middle, _ = name.split(".")
        layer, module = self.layers[int(index)], ".".join(middle)
        heads, kv_heads = layer.heads.heads.size, layer.heads.kv_heads.size
        if module == "kv_b":
            return (shape[0] // layer.total_heads * heads, *shape[1:])
        if module in ("q", "k", "v", "sinks"):
            own = kv_heads if module in ("k", "v") else heads
            total = layer.total_kv_heads if module in ("k", "v") else layer.total_heads
            return (shape[0] // total * own, *shape[1:])
        if module in ("o", "down", "gate", "up"):
            return ((layer.inner if module in ("gate", "up") else layer.outputs).size, *shape[1:])
        if module.startswith("shared."):
            rows = layer.outputs if module == "shared.down" else layer.shared_inner
            return (rows.size, *shape[1:])
        if module.startswith("experts."):
            return (shape[0], 2 * layer.inner.size if module == "experts.gate_up" else layer.outputs.size, *shape[2:])
        return shape

    def kv_spec(self, spec: ModelSpec, block_size: int, dtype: KvDtype) -> KvSpec:
        """Return the shape of the rank's KV cache."""
        shapes = tuple(
            (shard.heads.kv_heads.size, layer.attention.head_dim) for shard, layer in zip(self.layers, spec.layers, strict=True)
        )
        return KvSpec(block_size, dtype, shapes)


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A rank's place in a tensor-parallel group on one host, for the native kernels.

    barrier_address  of the group's BarrierState (csrc/process_barrier.h) in memory that all ranks map
    rows_file        descriptor of the file for the rows that ranks share; it grows with the largest step
    exchange         the exchange at each barrier if the ranks share no memory, see RowExchange
    has_whole_vocabulary  keep the whole embedding and LM head in addition to the shards, for draft heads that read them
    """

    shard: ModelShard
    barrier_address: int
    rows_file: int
    has_whole_vocabulary: bool = False
    exchange: Callable[[int, Sequence[tuple[int, int, int, int]]], bool] | None = None
