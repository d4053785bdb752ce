"""DeviceShard: the shard of a model's weights on a tensor-parallel rank's GPU, and how it is cut from whole weights.

There are two modes (https://arxiv.org/abs/1909.08053 has the second):

column-parallel with all-gather
    Every weight is cut by its outputs: no sum crosses ranks, so the bits are those of one rank. Used with `deterministic`.
column- then row-parallel with a sum
    q, k, v, gate and up are cut by outputs, o and down by inputs, and the ranks' parts of each sum are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.base.errors import ConfigError, InvariantError
from quire.contracts.model_spec import LayerSpec, ModelSpec, MoeSpec
from quire.model.parameters import Shape, parameter_shapes
from quire.model.tensor_shards import LayerShard, ModelShard
from quire.parallel.expert_placement import ExpertPlacement
from quire.parallel.shards import ShardRange, shard_range
from quire.quant.float8 import Float8Weight, concatenate_float8
from quire.quant.weight import QuantizedWeight, concatenate_rows

Opened = Tensor | QuantizedWeight | Float8Weight
_GROUP_SIZES = (128, 64, 32)
_OF_VOCABULARY = ("embed.", "lm_head.")
_ROW_PARALLEL = ("o.weight", "down.weight")  # the last also of experts, and of a shared expert


@dataclass(frozen=True, slots=True)
class DeviceShard:
    """The shard of one rank, and the sizes of the others'.

    spec         of the whole model
    ranks        the parts of all ranks
    is_in_order  every weight is cut by its outputs
    has_homes    every rank has the whole attention weights, and attends to sequences of its own
    """

    spec: ModelSpec
    ranks: tuple[ModelShard, ...]
    rank: int
    is_in_order: bool
    has_homes: bool = False

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        rank: int,
        shares: Sequence[float],
        is_in_order: bool,
        placements: Mapping[int, ExpertPlacement] | None = None,
        context_size: int = 1,
        has_homes: bool = False,
    ) -> DeviceShard:
        """Return the part of a rank, where rank r has shares[r] of the sum of `shares`.

        placements  with expert parallelism: where the whole experts of each layer are, by its index; None: without
        context_size  consecutive ranks that share the tokens of sequences
        has_homes   see DeviceShard

        Raises ConfigError if a rank would have no part of a weight.
        """
        if any(layer.attention.latent is not None and layer.attention.latent.indexer is not None for layer in spec.layers):
            raise ConfigError(
                f"tensor_parallel_size is {len(shares)}, but on GPUs an indexer of keys ({spec.model_type}) runs on one rank"
            )
        sizes = context_size, 1 if has_homes else 0
        ranks = [ModelShard.of(spec, each, shares, placements, *sizes) for each in range(len(shares))]
        if not is_in_order:
            ranks = [_with_whole_groups(spec, shard, shares) for shard in ranks]
        return cls(spec, tuple(ranks), rank, is_in_order, has_homes)

    @property
    def own(self) -> ModelShard:
        """The part of this rank."""
        return self.ranks[self.rank]

    def spec_of(self, rank: int) -> ModelSpec:
        """Return the model that a rank runs: with its heads, and its columns of the inside of feed-forward blocks."""
        layers = zip(self.spec.layers, self.ranks[rank].layers, strict=True)
        return replace(self.spec, layers=tuple(_layer_of(layer, shard) for layer, shard in layers))

    @property
    def local_spec(self) -> ModelSpec:
        """The model that this rank runs."""
        return self.spec_of(self.rank)

    @property
    def cached_spec(self) -> ModelSpec:
        """The model that this rank runs, with the key and value heads that its cache has."""
        layers = zip(self.local_spec.layers, self.own.layers, strict=True)
        return replace(self.local_spec, layers=tuple(_cached_layer(layer, shard) for layer, shard in layers))

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of this rank's parameters; those of _ROW_PARALLEL are found when they are opened."""
        whole, own = parameter_shapes(self.spec), parameter_shapes(self.local_spec)
        for name, shape in whole.items():
            if name.startswith(_OF_VOCABULARY):
                own[name] = (self.own.vocabulary.size, *shape[1:])
            elif (experts := self.own_experts(name)) is not None:
                own[name] = (len(experts), *shape[1:])
            elif (".q_norm." in name or ".k_norm." in name) and len(shape) == 1:  # not of each head
                own[name] = shape
        return own

    def is_row_parallel(self, name: str) -> bool:
        """Return whether a weight is cut by its inputs if its scales allow it."""
        if self.is_in_order or (self.has_homes and name.endswith(".o.weight")):
            return False
        return name.endswith(_ROW_PARALLEL) and self.own_experts(name) is None

    def own_experts(self, name: str) -> tuple[int, ...] | None:
        """Return which experts of a stack this rank has whole; None: a part of each, or it is no stack of experts."""
        if ".experts." not in name:
            return None
        own = self.own.layers[int(name.split(".")[1])].experts
        return None if own is None else own.experts

    def rows(self, name: str, num_rows: int) -> list[ShardRange] | None:
        """Return which rows of a parameter this rank has, of num_rows; None: all, or it is row-parallel."""
        if name.startswith(_OF_VOCABULARY):
            return [self.own.vocabulary]
        if not name.startswith("layers."):
            return None
        _, index, *middle, _ = name.split(".")
        module, shard = ".".join(middle), self.own.layers[int(index)]
        if module in ("q", "kv_b", "sinks", "attn_gate"):
            return [_scaled(shard.heads.heads, num_rows // shard.total_heads)]
        if module in ("k", "v"):
            return [_scaled(shard.heads.kv_heads, num_rows // shard.total_kv_heads)]
        if module in ("q_norm", "k_norm") and self._has_norm_of_each_head(int(index)):
            return [shard.heads.heads if module == "q_norm" else shard.heads.kv_heads]
        if module in ("gate", "up"):
            return [shard.inner]
        if module in ("shared.gate", "shared.up"):
            return [shard.shared_inner]
        if self.own_experts(name) is not None:
            return None
        if module == "experts.gate_up":
            inner, whole = shard.inner, num_rows // 2
            return [inner, ShardRange(whole + inner.start, whole + inner.stop)]
        if module == "o":
            return [shard.o_outputs]
        return [shard.outputs] if module in ("down", "experts.down", "shared.down") else None

    def _has_norm_of_each_head(self, index: int) -> bool:
        attention = self.spec.layers[index].attention
        return attention.qk_norm is not None and attention.qk_norm_over == "each"

    def columns(self, name: str) -> list[ShardRange]:
        """Return the columns of a row-parallel weight that each rank has."""
        index, module = int(name.split(".")[1]), name.split(".")[2]
        layer = self.spec.layers[index]
        if module == "shared":
            return [shard.layers[index].shared_inner for shard in self.ranks]
        if module != "o":
            return [shard.layers[index].inner for shard in self.ranks]
        dim = layer.attention.output_size // layer.attention.num_heads
        return [_scaled(shard.layers[index].heads.heads, dim) for shard in self.ranks]


def _with_whole_groups(spec: ModelSpec, shard: ModelShard, shares: Sequence[float]) -> ModelShard:
    """Return a shard whose intermediate columns are whole groups of quantised weights, if that keeps the shares."""
    layers: list[LayerShard] = []
    for layer, own in zip(spec.layers, shard.layers, strict=True):
        total = layer.mlp.expert.intermediate_size if isinstance(layer.mlp, MoeSpec) else layer.mlp.intermediate_size
        if own.experts is None:
            own = replace(own, inner=_in_whole_groups(total, own.inner, shard.rank, shares))
        if isinstance(layer.mlp, MoeSpec) and layer.mlp.shared is not None:
            total = layer.mlp.shared.intermediate_size
            own = replace(own, shared_inner=_in_whole_groups(total, own.shared_inner, shard.rank, shares))
        layers.append(own)
    return replace(shard, layers=tuple(layers))


def _in_whole_groups(total: int, given: ShardRange, rank: int, shares: Sequence[float]) -> ShardRange:
    """Return a rank's range of `total` columns in whole groups, if that keeps the shares; otherwise the given range."""
    is_equal = len(set(shares)) == 1
    for multiple in _GROUP_SIZES:
        if total % (multiple * len(shares)) == 0 if is_equal else total >= 16 * multiple * len(shares):
            return shard_range(total, rank, shares, multiple)
    return given


def _layer_of(layer: LayerSpec, shard: LayerShard) -> LayerSpec:
    own, slopes = shard.heads.heads, layer.attention.alibi_slopes[shard.heads.heads.start : shard.heads.heads.stop]
    sizes = {"num_heads": own.size, "num_kv_heads": shard.heads.kv_heads.size}
    attention = replace(layer.attention, **sizes, alibi_slopes=slopes)
    if isinstance(layer.mlp, MoeSpec):
        mlp = replace(layer.mlp, expert=replace(layer.mlp.expert, intermediate_size=shard.inner.size))
        if mlp.shared is not None:
            mlp = replace(mlp, shared=replace(mlp.shared, intermediate_size=shard.shared_inner.size))
    else:
        mlp = replace(layer.mlp, intermediate_size=shard.inner.size)
    return replace(layer, attention=attention, mlp=mlp)


def _cached_layer(layer: LayerSpec, shard: LayerShard) -> LayerSpec:
    cached = shard.heads if shard.context is None else shard.context
    sizes = {"num_heads": cached.heads.size, "num_kv_heads": cached.kv_heads.size}
    return replace(layer, attention=replace(layer.attention, **sizes))


def _scaled(part: ShardRange, rows: int) -> ShardRange:
    return ShardRange(part.start * rows, part.stop * rows)


def take_rows(weight: Opened, rows: Sequence[ShardRange]) -> Opened:
    """Return ranges of the rows of a weight, or of another parameter, one after the other."""
    if isinstance(weight, Tensor):
        parts = [weight[part.start : part.stop] for part in rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    if isinstance(weight, QuantizedWeight):
        joined = concatenate_rows([weight.rows(part.start, part.stop) for part in rows])
    else:
        joined = concatenate_float8([weight.rows(part.start, part.stop) for part in rows])
    if joined is None:
        raise InvariantError("the rows of one weight do not fit together")
    return joined


def reason_not_to_take_columns(weight: Opened, columns: Sequence[ShardRange]) -> str | None:
    """Return why a weight cannot be cut into ranges of its columns; None: it can."""
    if isinstance(weight, Tensor):
        return None
    if isinstance(weight, QuantizedWeight) and weight.columns is not None:
        return "its columns have an order of their own"
    group_size = weight.block[1] if isinstance(weight, Float8Weight) else weight.group_size
    if group_size >= weight.shape[1]:
        return None
    if any(part.start % group_size or (part.stop % group_size and part.stop != weight.shape[1]) for part in columns):
        return f"a rank's columns are no multiple of {group_size}, which share a scale"
    return None


def take_columns(weight: Opened, columns: ShardRange) -> Opened:
    """Return a range of the columns of a weight; reason_not_to_take_columns has none against it."""
    start, stop = columns.start, columns.stop
    if isinstance(weight, Tensor):
        return weight[:, start:stop]
    if isinstance(weight, Float8Weight):
        wide = weight.block[1]
        if wide >= weight.shape[1]:
            return replace(weight, codes=weight.codes[:, start:stop], block=(weight.block[0], columns.size))
        return replace(weight, codes=weight.codes[:, start:stop], scale=weight.scale[:, start // wide : -(-stop // wide)])
    if weight.group_size >= weight.shape[1]:
        return replace(weight, codes=weight.codes[:, start:stop])
    groups = slice(start // weight.group_size, stop // weight.group_size)
    offset = None if weight.offset is None else weight.offset[:, groups]
    return replace(weight, codes=weight.codes[:, start:stop], scale=weight.scale[:, groups], offset=offset)
