"""ExpertExchange: experts of a layer that are spread over the ranks of a group of GPUs, and the exchange of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.model_spec import MlpSpec, MoeSpec
from quire.kernels.triton.adding import add_parts_launch
from quire.kernels.triton.moe import Routes, add_pairs
from quire.model.device_ranks import DeviceRanks, LayerRanks
from quire.parallel.torch_communicator import ORDERED_BYTES

MultiplyPairs = Callable[[Tensor, Routes, Tensor | None], Tensor]
"""(rows [T, N], routes to experts of this rank; negative: none, numbers of the rows' adapters) -> weighted outputs [P, N],
zeros where there is no expert."""


class _Copies(NamedTuple):
    """Rows that are sent: one copy for each rank that has experts of a row, in the order of ranks.

    row, rank       [C] i64 of each copy
    sizes           copies, and pairs, that go to each rank; out_sizes: that come from each
    """

    row: Tensor
    rank: Tensor
    sizes: tuple[list[int], list[int]]
    out_sizes: tuple[list[int], list[int]]


class ExpertExchange:
    """Runs the experts of one layer. Every rank has whole experts and knows the routes of all rows.

    In steps of few rows every rank has all rows, and computes the pairs of its experts; nothing waits for the host, so such
    steps can be recorded. In larger ones each rank sends, of a part of the rows, one copy of a row to each rank that has
    experts of it (all-to-all), in the model's dtype, which the products read, and gets back what these have computed: with
    `is_in_order` one row for each pair, which it adds in the order of choice, as one rank does; otherwise one row for each
    copy, the sum of its pairs, which it adds in the order of ranks. The host waits once for the numbers of rows.

    experts  of each rank; each expert of the layer is on one
    top_k    choices of a row
    """

    def __init__(
        self, ranks: DeviceRanks, experts: list[tuple[int, ...]], top_k: int, is_in_order: bool, device: torch.device
    ) -> None:
        self._ranks, self._top_k, self._is_in_order = ranks, top_k, is_in_order
        self.num_own = len(experts[ranks.shard.rank])
        owners = {expert: rank for rank, own in enumerate(experts) for expert in own}
        if sum(map(len, experts)) != len(owners):
            raise InvariantError("an expert is on several GPUs")
        own = {expert: place for place, expert in enumerate(experts[ranks.shard.rank])}
        order = range(len(owners))
        self._owner = torch.tensor([owners[expert] for expert in order], device=device)
        self._place = torch.tensor([own.get(expert, -1) for expert in order], dtype=torch.int32, device=device)
        self._all_ranks = torch.arange(len(experts), device=device)

    @classmethod
    def of(
        cls, mlp: MlpSpec | MoeSpec, ranks: LayerRanks | None, is_in_order: bool, own: Mapping[str, Tensor]
    ) -> ExpertExchange | None:
        """Return that of a layer with these dense parameters; None: its experts are not spread over ranks."""
        if not isinstance(mlp, MoeSpec) or ranks is None or not ranks.experts:
            return None
        return cls(ranks.whole, ranks.experts, mlp.top_k, is_in_order, own["router.weight"].device)

    def run(self, x: Tensor, routes: Routes, multiply: MultiplyPairs, adapters: Tensor | None = None) -> tuple[Tensor, bool]:
        """Return what the experts give [T, N], and whether that is this rank's part of a sum. While rows are divided: complete
        rows of this rank only, unless it is a part of a sum.

        x         [T, N] what the experts read, of all rows
        routes    of all rows
        adapters  [T] i32 the number of each row's LoRA adapter, -1: none; None: no row has one
        """
        if not self._sends_rows(x):
            return self._run_all(x, routes, multiply, adapters)
        own = self._ranks.own_rows(len(x))
        pairs = slice(own.start * self._top_k, own.stop * self._top_k)
        numbers = None if adapters is None else adapters[own]
        found = self._exchange(x[own], Routes(routes.shares[pairs], routes.experts[pairs]), multiply, numbers)
        return (found if self._ranks.has_divided_rows else self._ranks.gather_rows_of(found, len(x))), False

    def _sends_rows(self, x: Tensor) -> bool:
        if x.is_meta or self._ranks.is_measuring or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        return self._ranks.has_divided_rows or x.nbytes > ORDERED_BYTES

    def _run_all(self, x: Tensor, routes: Routes, multiply: MultiplyPairs, adapters: Tensor | None) -> tuple[Tensor, bool]:
        """The same where all ranks have all rows."""
        experts = routes.experts.long()
        parts = multiply(x, Routes(routes.shares, self._place[experts]), adapters)
        if not self._is_in_order or self._ranks.is_measuring:
            return add_pairs(parts, self._top_k), True
        gathered = self._ranks.gather(parts)
        pairs = torch.arange(len(parts), device=x.device)
        return add_pairs(gathered[self._owner[experts], pairs], self._top_k), False

    def _exchange(self, x: Tensor, routes: Routes, multiply: MultiplyPairs, adapters: Tensor | None) -> Tensor:
        """Return what the experts give for this rank's rows [t, N]."""
        owner = self._owner[routes.experts.long()].view(len(x), self._top_k)
        copies = self._copies(owner)
        parts_told = [routes.experts, routes.shares.view(torch.int32)]
        parts_told += [] if adapters is None else [adapters.repeat_interleave(self._top_k)]
        told = torch.stack(parts_told, 1).view(len(x), len(parts_told) * self._top_k)
        rows = self._send(x[copies.row], copies.sizes[0], copies.out_sizes[0])
        told = self._send(told[copies.row], copies.sizes[0], copies.out_sizes[0]).view(-1, len(parts_told))
        places = self._place[told[:, 0].long()]
        numbers = None if adapters is None else told[:: self._top_k, 2].contiguous()
        parts = multiply(rows, Routes(told[:, 1].contiguous().view(torch.float32), places), numbers)
        if self._is_in_order:
            results = self._send(parts[places >= 0], copies.out_sizes[1], copies.sizes[1])
            pairs = torch.empty_like(results)
            pairs[owner.flatten().argsort(stable=True)] = results
            return add_pairs(pairs, self._top_k)
        results = self._send(add_pairs(parts, self._top_k), copies.out_sizes[0], copies.sizes[0])
        by_rank = x.new_zeros(len(self._all_ranks), *x.shape)
        by_rank[copies.rank, copies.row] = results
        out = torch.empty_like(x)
        if len(x):
            add_parts_launch(out, by_rank).run()
        return out

    def _copies(self, owner: Tensor) -> _Copies:
        """Return which rows go where, given the rank of each pair [t, top_k]; the host waits for their numbers."""
        is_at = owner[:, :, None] == self._all_ranks
        is_sent = is_at.any(1)
        rank, row = is_sent.T.nonzero(as_tuple=True)
        counts = self._ranks.gather(torch.stack((is_sent.sum(0), is_at.sum((0, 1)))))  # [from, copies or pairs, to]
        table, own = counts.tolist(), self._ranks.shard.rank
        sizes = table[own][0], table[own][1]
        return _Copies(row, rank, sizes, ([each[0][own] for each in table], [each[1][own] for each in table]))

    def _send(self, x: Tensor, sizes: list[int], out_sizes: list[int]) -> Tensor:
        out = x.new_empty(sum(out_sizes), *x.shape[1:])
        self._ranks.communicator.all_to_all(out, x.contiguous(), out_sizes, sizes)
        return out
