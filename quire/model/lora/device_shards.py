"""AdapterShard: the part of LoRA adapters that a tensor-parallel rank's GPU has, cut like the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.model.device_shards import DeviceShard
from quire.model.lora.experts import LowRankPair, is_expert
from quire.model.parameters import Shape, shapes_with_head
from quire.parallel.shards import ShardRange


@dataclass(frozen=True, slots=True)
class AdapterShard:
    """How a rank's part is cut.

    A weight that is cut by its outputs has the same rows of the second matrix, and the whole first one. A weight that is cut by
    its inputs has the same columns of the first matrix, and the whole second one: what it gives is a part of the ranks' sum.

    row_parallel  names of the weights that are cut by their inputs
    """

    shard: DeviceShard
    row_parallel: frozenset[str]

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of this rank's linear layers, with lm_head, and of its stacks of experts."""
        whole = shapes_with_head(self.shard.spec)
        return {name: self._shape(name, shape) for name, shape in whole.items() if name.endswith(".weight") and len(shape) > 1}

    def _shape(self, name: str, shape: Shape) -> Shape:
        experts = self.shard.own_experts(name)
        if experts is not None:
            return (len(experts), *shape[1:])
        *stack, rows, columns = shape
        if name in self.row_parallel:
            return (*stack, rows, self._columns(name).size)
        own = self.shard.rows(name, rows)
        return shape if own is None else (*stack, sum(part.size for part in own), columns)

    def _columns(self, name: str) -> ShardRange:
        return self.shard.columns(name)[self.shard.rank]

    def pairs(self, name: str, pair: LowRankPair) -> dict[str, LowRankPair]:
        """Return canonical name on this rank -> its part of a pair; nothing for an expert of another rank.

        name  canonical, without ".weight"
        """
        if not is_expert(name):
            return {name: self._cut(f"{name}.weight", pair, self.shard.rows(f"{name}.weight", len(pair.b)))}
        prefix, expert, module = name.rsplit(".", 2)
        stack = f"{prefix}.{'down' if module == 'down' else 'gate_up'}.weight"
        experts = self.shard.own_experts(stack)
        if experts is not None:
            return {f"{prefix}.{experts.index(int(expert))}.{module}": pair} if int(expert) in experts else {}
        inner = self.shard.own.layers[int(name.split(".")[1])].inner
        return {name: self._cut(stack, pair, self.shard.rows(stack, len(pair.b)) if module == "down" else [inner])}

    def _cut(self, weight: str, pair: LowRankPair, rows: Sequence[ShardRange] | None) -> LowRankPair:
        if weight in self.row_parallel:
            columns = self._columns(weight)
            return LowRankPair(pair.a[:, columns.start : columns.stop], pair.b)
        return pair if rows is None else LowRankPair(pair.a, _rows(pair.b, rows))


def _rows(matrix: Tensor, ranges: Sequence[ShardRange]) -> Tensor:
    return torch.cat([matrix[part.start : part.stop] for part in ranges])
