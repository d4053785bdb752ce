"""DeviceRanks: the collectives of a tensor-parallel group of GPUs during a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from quire.contracts.model_spec import ModelSpec, MoeSpec
from quire.kernels.triton.adding import add_parts_launch
from quire.model.device_collectives import Collectives, gather, gather_columns
from quire.model.device_context import ContextRanks, LayerContext
from quire.model.device_linear import DeviceLinear
from quire.model.device_shards import DeviceShard
from quire.parallel.expert_placement import ExpertPlacement
from quire.parallel.torch_communicator import ORDERED_BYTES

PartKind = Literal["sum", "columns", "whole"]
"""What a rank has of the output of a block."""


class DeviceRanks:
    """The group of a rank. All ranks make the same calls in the same order; none but `read` waits for the device.

    communicator  of the group, on the model's device
    shard         the part of this rank
    hosts         of the ranks, equal for ranks of one host; None: all are on one
    context       those that share the tokens of sequences with this one; None: each has all tokens
    """

    def __init__(
        self,
        communicator: Collectives,
        shard: DeviceShard,
        hosts: Sequence[int] | None = None,
        context: ContextRanks | None = None,
    ) -> None:
        self.communicator, self.shard, self.context = communicator, shard, context
        self.hosts = tuple(hosts or (0,) * len(shard.ranks))
        self._vocabulary = tuple(each.vocabulary.size for each in shard.ranks)
        self._row_sizes: tuple[int, ...] | None = None
        self._home_bytes: int | None = None
        self.is_measuring = False

    @property
    def specs(self) -> list[ModelSpec]:
        """The model that each rank runs; they may have different numbers of query heads for each KV head."""
        return [self.shard.spec_of(rank) for rank in range(len(self.shard.ranks))]

    def gather_columns(self, part: Tensor, sizes: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Return the columns of all ranks one after the other, [T, sum(sizes)]; in `out` if that is given.

        part   [T, sizes[rank]], this rank's
        sizes  columns of each rank
        """
        return gather_columns(self.communicator, part, sizes, out)

    def sum_parts(self, part: Tensor) -> Tensor:
        """Return the sum of the ranks' partial sums [T, N], which may overwrite `part`.

        Up to ORDERED_BYTES the sum is in f32 in rank order; larger sums use the library's order. While rows are divided, only
        this rank's rows of the sum, in f32 in rank order.
        """
        if self._row_sizes is not None:
            own = part.new_empty(self._row_sizes[self.shard.rank], part.shape[1])
            self.communicator.reduce_scatter(own, part, self._row_sizes)
            return own
        if part.nbytes > ORDERED_BYTES:
            self.communicator.all_reduce(part, in_order=False)
            return part
        out = torch.empty_like(part)
        add_parts_launch(out, self.gather(part)).run()
        return out

    def add_sum(self, x: Tensor, part: Tensor, residual_scale: float) -> None:
        """Add the sum of the ranks' partial sums [T, N], for few tokens, to the residual stream x in place."""
        add_parts_launch(x, self.gather(part), residual_scale).run()

    @contextmanager
    def divided_rows(self, x: Tensor, of_homes: Sequence[int] | None = None) -> Iterator[Tensor]:
        """Divide the rows of the residual stream x [T, N] among the ranks within the block (sequence parallelism): yields this
        rank's, and sum_parts returns these only, until gather_rows.

        of_homes  the rows of each rank, at least one, which are its home's; None: about equally many
        """
        self._home_bytes = None if of_homes is None else x.nbytes
        self._row_sizes = self.row_sizes(len(x)) if of_homes is None else tuple(of_homes)
        try:
            yield x[self.own_rows(len(x))]
        finally:
            self._row_sizes = self._home_bytes = None

    def row_sizes(self, num_rows: int) -> tuple[int, ...]:
        """Return how many of some rows are each rank's, where they are divided."""
        if self._row_sizes is not None:
            return self._row_sizes
        size = self.communicator.size
        ends = [rank * num_rows // size for rank in range(size + 1)]
        return tuple(end - start for start, end in itertools.pairwise(ends))

    def own_rows(self, num_rows: int) -> slice:
        """Return which of some rows are this rank's, where they are divided."""
        sizes, rank = self.row_sizes(num_rows), self.shard.rank
        return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    @property
    def has_divided_rows(self) -> bool:
        """Whether the rows of the residual stream are divided now."""
        return self._row_sizes is not None

    @property
    def home_bytes(self) -> int | None:
        """Bytes of the residual stream of all homes, where its rows are divided by home now; otherwise None."""
        return self._home_bytes

    def own_part(self, rows: Tensor) -> Tensor:
        """Return this rank's of all rows [T, N]; all, while they are not divided."""
        return rows if self._row_sizes is None else rows[self.own_rows(len(rows))]

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Run steps within the block as if every rank had experts of all rows, which takes the most memory that a step can."""
        self.is_measuring = True
        try:
            yield
        finally:
            self.is_measuring = False

    def gather_rows(self, part: Tensor) -> Tensor:
        """Return the rows [T, N] of all ranks, given this rank's; all rows, as they are, while they are not divided."""
        return part if self._row_sizes is None else self.gather_rows_of(part, sum(self._row_sizes))

    def gather_rows_of(self, part: Tensor, num_rows: int) -> Tensor:
        """Return all rows [num_rows, N], given this rank's part of them."""
        out = part.new_empty(num_rows, part.shape[1])
        self.communicator.all_gather(out, part.contiguous(), self.row_sizes(num_rows))
        return out

    def lookup(self, embedding: DeviceLinear, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows ids [T] i64 of an embedding that is sharded by rows; exact, since all parts but one are zeros."""
        own = self.shard.own.vocabulary
        is_elsewhere = (ids < own.start) | (ids >= own.stop)
        rows = embedding.lookup((ids - own.start).masked_fill(is_elsewhere, 0), dtype)
        return self.sum_parts(rows.masked_fill_(is_elsewhere[:, None], 0.0))

    def gather_logits(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [R, vocab_size], given those of this rank's tokens; in `out` if that is given."""
        return self.gather_columns(part, self._vocabulary, out)

    def read(self, numbers: Tensor) -> list[Any]:
        """Return numbers of the device as lists. The host waits; raises WorkerError if the group ends before they are there."""
        if numbers.is_cuda:
            found = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            found.copy_(numbers, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self.communicator.wait_for(event)
            numbers = found
        lists: list[Any] = numbers.tolist()
        return lists

    def gather(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks [R, T, N]."""
        return gather(self.communicator, part)


class LayerRanks:
    """The collectives of one layer.

    row_parallel  names of this layer's weights that are cut by their inputs: "o", "down", "experts.down", "shared.down"

    placement  with expert parallelism: where the experts are; None: every rank has a part of each
    """

    def __init__(self, ranks: DeviceRanks, index: int, row_parallel: frozenset[str]) -> None:
        self._ranks, self.row_parallel = ranks, row_parallel
        layers = [shard.layers[index] for shard in ranks.shard.ranks]
        attention = ranks.shard.spec.layers[index].attention
        dim = attention.output_size // max(1, attention.num_heads)
        self._inputs = {
            "o": tuple(layer.heads.heads.size * dim for layer in layers),
            "down": tuple(layer.inner.size for layer in layers),
            "shared.down": tuple(layer.shared_inner.size for layer in layers),
        }
        self._outputs = tuple(layer.outputs.size for layer in layers)
        self._heads, self._own_heads = [layer.heads for layer in layers], layers[ranks.shard.rank].heads
        self._dim = dim
        context, self.context = ranks.context, None
        if context is not None:
            first = ranks.shard.rank - context.place
            own = ranks.shard.local_spec.layers[index].attention
            self.context = LayerContext(context, own, self._heads[first : first + context.size])
        experts = [layer.experts for layer in layers]
        whole, mlp = tuple(each.experts for each in experts if each is not None), ranks.shard.spec.layers[index].mlp
        self.placement = ExpertPlacement(mlp.num_experts, whole) if whole and isinstance(mlp, MoeSpec) else None

    @classmethod
    def of(cls, ranks: DeviceRanks | None, index: int, row_parallel: Iterable[str]) -> LayerRanks | None:
        """Return those of a layer; row_parallel: names of all weights of the model that are cut by their inputs."""
        if ranks is None:
            return None
        prefix = f"layers.{index}."
        names = (name for name in row_parallel if name.startswith(prefix))
        return cls(ranks, index, frozenset(name.removeprefix(prefix).removesuffix(".weight") for name in names))

    @property
    def whole(self) -> DeviceRanks:
        """The group."""
        return self._ranks

    @property
    def first_head(self) -> int:
        """This rank's first query head."""
        return self._own_heads.heads.start

    @property
    def num_heads(self) -> int:
        """Query heads of all ranks together."""
        return sum(each.heads.size for each in self._heads)

    def close_block(self, name: str, linear: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Return the output [T, hidden_size] of attention ("o") or of the feed-forward block ("down").

        linear  of this rank's part of the weight
        rows    [T, K] this rank's part of its inputs
        """
        if name in self.row_parallel:
            return self._ranks.sum_parts(linear(rows))
        return self.gather_outputs(linear(self._ranks.gather_columns(rows, self._inputs[name])))

    def gather_rows(self, part: Tensor) -> Tensor:
        """See DeviceRanks."""
        return self._ranks.gather_rows(part)

    def attention_rows(self, part: Tensor) -> Tensor:
        """Return the rows that attention reads, given this rank's: all, or those of the sequences at home here."""
        return part if self._ranks.shard.has_homes else self._ranks.gather_rows(part)

    def add_sum(self, x: Tensor, part: Tensor, residual_scale: float) -> None:
        """See DeviceRanks."""
        self._ranks.add_sum(x, part, residual_scale)

    def close_part(self, part: Tensor, kind: PartKind) -> Tensor:
        """Return the output [T, hidden_size] of a block, given this rank's part of the sum, its columns, or all of it."""
        if kind == "whole":
            return part
        return self._ranks.sum_parts(part) if kind == "sum" else self.gather_outputs(part)

    def gather_inner(self, part: Tensor, name: str = "down") -> Tensor:
        """Return the intermediate activations [T, I] of the feed-forward block, or of the shared expert, given this rank's
        columns."""
        return self._ranks.gather_columns(part, self._inputs[name])

    def gather_outputs(self, part: Tensor) -> Tensor:
        """Return the output [T, hidden_size] of a block, given this rank's columns of all rows; while rows are divided, this
        rank's rows of it."""
        return self._ranks.own_part(self._ranks.gather_columns(part, self._outputs))

    def gather_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k of all heads, [T, H * D] and [T, K * D], given those of this rank's: for a norm over all of them."""
        sizes = [(own.heads.size * self._dim, own.kv_heads.size * self._dim) for own in self._heads]
        both = self._ranks.gather_columns(torch.cat((q, k), 1), [sum(pair) for pair in sizes])
        parts = both.split([size for pair in sizes for size in pair], 1)
        seen: set[int] = set()  # kv heads that several ranks hold
        keys: list[Tensor] = []
        for own, part in zip(self._heads, parts[1::2], strict=True):
            if own.kv_heads.start not in seen:
                seen.add(own.kv_heads.start)
                keys.append(part)
        return torch.cat(parts[::2], 1), torch.cat(keys, 1)

    def own_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's heads of q and k of all heads."""
        heads, kv_heads, dim = self._own_heads.heads, self._own_heads.kv_heads, self._dim
        return q[:, heads.start * dim : heads.stop * dim], k[:, kv_heads.start * dim : kv_heads.stop * dim]
