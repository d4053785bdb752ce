"""ExpertExchange: experts of a layer that are spread over the ranks of a group of GPUs, and the exchange of their rows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.contracts.model_spec import MlpSpec, MoeSpec
from quire.kernels.triton.adding import add_parts_launch
from quire.kernels.triton.moe import Routes, add_pairs
from quire.model.device_ranks import DeviceRanks, LayerRanks
from quire.model.expert_legs import Leg, LegMaker
from quire.parallel.expert_placement import ExpertPlacement
from quire.parallel.torch_communicator import ORDERED_BYTES

MultiplyPairs = Callable[[Tensor, Routes, Tensor | None], Tensor]
"""(rows [T, N] in the form that products read, routes to experts of this rank; negative: none, numbers of the rows' adapters)
-> weighted outputs [P, N], zeros where there is no expert."""

FormRows = Callable[[Tensor, int], Tensor]
"""(rows [T, N], number of rows of all ranks) -> the same in the form that products read, in which they are sent."""

HALVES_ROWS = 256
"""Rows of a rank from which on a step is exchanged in two halves; an estimate, not measured."""

_Exchanging = Generator[None, None, Tensor]
"""Stops each time it has begun an exchange; returns the results of a part of this rank's rows."""


class ExpertExchange:
    """Runs the experts of one layer. Every rank has whole experts.

    In steps of few rows every rank has all rows, and computes the pairs of its experts; nothing waits for the host, so such
    steps can be captured. In larger ones each rank is responsible for a part of the rows. Where ranks have only these, each
    sends one copy of a row to each rank that has experts of it (all-to-all), in the form that the products read; otherwise all
    have what they compute. The results come back in the model's dtype: with `is_in_order` one row for each pair, which are
    added in the order of choice, as one rank does; otherwise one row for each copy, the sum of its pairs, which are added in
    the order of ranks. The host waits once for the numbers of rows. With ranks on several hosts see LegMaker.

    From HALVES_ROWS on, rows are exchanged in two halves: while experts compute one, the other is on its way.

    placement  where the experts are; the copies of one divide its rows by turns
    top_k      choices of a row

    needs_all_rows  routes depend on other rows, so that each rank makes those of all; False at first
    """

    def __init__(
        self, ranks: DeviceRanks, placement: ExpertPlacement, top_k: int, is_in_order: bool, device: torch.device
    ) -> None:
        self._ranks, self._top_k, self._is_in_order = ranks, top_k, is_in_order
        self._rank, self.needs_all_rows = ranks.shard.rank, False
        self.num_own = len(placement.ranks[self._rank])
        self.placement, self._slots = placement, list(placement.ranks[self._rank])
        self._holders, self._num_copies, self._place = (table.to(device) for table in self._tables())
        self._legs = LegMaker(self._rank, ranks.hosts, device, ranks.read)

    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return of each expert: the ranks that hold its copies [E, R], how many these are [E], and its slot here or -1 [E]."""
        by_rank, size = list(enumerate(self.placement.ranks)), len(self.placement.ranks)
        experts = range(self.placement.num_experts)
        holders = [[rank for rank, own in by_rank if expert in own] for expert in experts]
        slots = [self._slots.index(expert) if expert in self._slots else -1 for expert in experts]
        counts = torch.tensor([len(each) for each in holders])
        return torch.tensor([(each * size)[:size] for each in holders]), counts, torch.tensor(slots, dtype=torch.int32)

    def place(self, placement: ExpertPlacement) -> list[tuple[int, int]]:
        """Take another placement, with as many experts on this rank, for the steps that are launched from now on.

        Returns the slots of this rank that get another expert, and which; all others stay where they are.
        """
        own = placement.ranks[self._rank]
        new = iter([expert for expert in own if expert not in self._slots])
        changed = [(slot, next(new)) for slot, expert in enumerate(self._slots) if expert not in own]
        for slot, expert in changed:
            self._slots[slot] = expert
        self.placement = placement
        # In place: CUDA graphs read these.
        for table, values in zip((self._holders, self._num_copies, self._place), self._tables(), strict=True):
            table.copy_(values)
        return changed

    @classmethod
    def of(
        cls, mlp: MlpSpec | MoeSpec, ranks: LayerRanks | None, is_in_order: bool, own: Mapping[str, Tensor]
    ) -> ExpertExchange | None:
        """Return that of a layer with these dense parameters; None: its experts are not spread over ranks."""
        if not isinstance(mlp, MoeSpec) or ranks is None or ranks.placement is None:
            return None
        return cls(ranks.whole, ranks.placement, mlp.top_k, is_in_order, own["router.weight"].device)

    def takes_own_rows(self, x: Tensor) -> bool:
        """Return whether `run` takes this rank's rows only, of a residual stream whose rows are divided."""
        return self._ranks.has_divided_rows and self._exchanges(x) and not self.needs_all_rows

    def run(
        self,
        x: Tensor,
        routes: Routes,
        multiply: MultiplyPairs,
        note: Callable[[Tensor], None] | None = None,
        adapters: Tensor | None = None,
        form: FormRows | None = None,
    ) -> tuple[Tensor, bool]:
        """Return what the experts give [T, N], and whether that is this rank's part of a sum. While rows are divided: complete
        rows of this rank only, unless it is a part of a sum.

        x         [T, N] what the experts read, of all rows; of this rank's only, where takes_own_rows says so
        routes    of the same rows
        note      takes the experts of all pairs of all rows
        adapters  [T] i32 the number of each row's LoRA adapter, -1: none; x has all rows then. None: no row has one
        form      makes what is sent, and what `multiply` gets, of x; None: x itself
        """
        has_own_rows = adapters is None and self.takes_own_rows(x)
        if has_own_rows:
            routes = self._gather_routes(routes)
        if note is not None:
            note(routes.experts)
        exchanges, num_rows = self._exchanges(x), len(routes.experts) // self._top_k
        x = x if form is None else form(x, num_rows)
        if not exchanges:
            return self._run_all(x, routes, multiply, adapters)
        found = self._exchange(x, routes, num_rows, multiply, has_own_rows, adapters)
        return (found if self._ranks.has_divided_rows else self._ranks.gather_rows_of(found, num_rows)), False

    def _exchanges(self, x: Tensor) -> bool:
        if x.is_meta or self._ranks.is_measuring or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        if self._ranks.home_bytes is not None:
            return self._ranks.home_bytes > ORDERED_BYTES
        return self._ranks.has_divided_rows or x.nbytes > ORDERED_BYTES

    def _owners(self, experts: Tensor, rows: Tensor) -> Tensor:
        """Return the rank that computes each pair; -1: none. rows: of the pairs, counted over all ranks."""
        chosen = experts.long().clamp(min=0)
        return self._holders[chosen, rows % self._num_copies[chosen]].where(experts >= 0, -1)

    def _places(self, experts: Tensor, owners: Tensor) -> Tensor:
        """Return the place of each pair's expert on this rank; -1: another rank computes it."""
        return self._place[experts.long().clamp(min=0)].where(owners == self._rank, -1)

    def _run_all(self, x: Tensor, routes: Routes, multiply: MultiplyPairs, adapters: Tensor | None) -> tuple[Tensor, bool]:
        """The same where all ranks have all rows."""
        pairs, num_rows = torch.arange(len(routes.experts), device=x.device), len(x)
        owners = self._owners(routes.experts, pairs // self._top_k)
        parts = multiply(x, Routes(routes.shares, self._places(routes.experts, owners)), adapters)
        if not self._is_in_order or self._ranks.is_measuring:
            return add_pairs(parts, self._top_k), True
        if self._ranks.has_divided_rows:
            own = self._ranks.own_rows(num_rows)
            place = slice(own.start * self._top_k, own.stop * self._top_k)
            owners, pairs = owners[place], pairs[place]
        return add_pairs(self._ranks.gather(parts)[owners, pairs], self._top_k), False

    def _gather_routes(self, own: Routes) -> Routes:
        """Return the routes of all rows, given those of this rank's."""
        told = torch.stack((own.experts, own.shares.view(torch.int32)), 1).view(-1, 2 * self._top_k)
        told = self._ranks.gather_rows(told).view(-1, 2)
        return Routes(told[:, 1].contiguous().view(torch.float32), told[:, 0].contiguous())

    def _exchange(
        self, x: Tensor, routes: Routes, num_rows: int, multiply: MultiplyPairs, has_own_rows: bool, adapters: Tensor | None
    ) -> Tensor:
        """Return what the experts give for this rank's rows [t, N]; routes: of all rows, x: of all or of this rank's."""
        size, rows = len(self._ranks.hosts), torch.arange(num_rows, device=x.device)
        sizes = self._ranks.row_sizes(num_rows)
        source = torch.cat([rows.new_full((count,), rank) for rank, count in enumerate(sizes)])
        owners = self._owners(routes.experts, rows.repeat_interleave(self._top_k)).view(num_rows, self._top_k)
        num_pairs = (owners[:, :, None] == torch.arange(size, device=x.device)).sum(1)
        own = self._ranks.own_rows(num_rows)
        call = _Call(x, own.start if has_own_rows else None, routes, owners, source, multiply, adapters)
        if min(sizes) < HALVES_ROWS:
            parts, halves = [own], [rows >= 0]
        else:
            middle = (own.start + own.stop) // 2
            parts = [slice(own.start, middle), slice(middle, own.stop)]
            is_first = torch.cat([torch.arange(count, device=x.device) < count // 2 for count in sizes])
            halves = [is_first, ~is_first]
        legs = self._legs.make(num_pairs, source, halves)
        return torch.cat(_in_turns([self._run_part(call, each, part) for each, part in zip(legs, parts, strict=True)]))

    def _run_part(self, call: _Call, legs: Sequence[Leg], own: slice) -> _Exchanging:
        """Exchange a part of the rows and multiply it; own: this rank's rows of it."""
        num_rows, last = len(call.source), legs[-1]
        if call.first is None:
            rows = call.x[last.received]
        else:
            rows, place = call.x, legs[0].sent - call.first
            for index, leg in enumerate(legs, 1):
                rows = yield from self._send(rows[place], leg.sizes, leg.out_sizes)
                place = place if index == len(legs) else leg.position(num_rows)[legs[index].sent]
        pairs = num_rows, self._top_k
        experts = call.routes.experts.view(pairs)[last.received].flatten()
        shares = call.routes.shares.view(pairs)[last.received].flatten()
        places = self._places(experts, call.owners[last.received].flatten())
        adapters = None if call.adapters is None else call.adapters[last.received]
        results = call.multiply(rows, Routes(shares, places), adapters)
        return (yield from (self._return_pairs if self._is_in_order else self._return_sums)(call, legs, own, results, places))

    def _return_pairs(self, call: _Call, legs: Sequence[Leg], own: slice, results: Tensor, places: Tensor) -> _Exchanging:
        """Return the sums of this rank's rows, whose pairs come back one by one."""
        last = legs[-1]
        is_here = torch.nonzero_static(places >= 0, size=sum(last.pair_out_sizes))[:, 0]
        results = yield from self._send(results[is_here], last.pair_out_sizes, last.pair_sizes)
        if len(legs) > 1:
            sources = call.source[last.sent].repeat_interleave(last.sent_pairs, output_size=len(results))
            sizes = legs[0].pair_out_sizes, legs[0].pair_sizes
            results = yield from self._send(results[sources.argsort(stable=True)], *sizes)
        pairs = torch.empty_like(results)
        pairs[self._legs.return_order[call.owners[own].flatten()].argsort(stable=True)] = results
        return add_pairs(pairs, self._top_k)

    def _return_sums(self, call: _Call, legs: Sequence[Leg], own: slice, results: Tensor, places: Tensor) -> _Exchanging:
        """Return the sums of this rank's rows; a rank sends back the sum of each copy's pairs."""
        results = add_pairs(results, self._top_k)
        for leg, before in zip(reversed(legs), [*reversed(legs[:-1]), None], strict=True):
            results = yield from self._send(results, leg.out_sizes, leg.sizes)
            if before is None:
                num_rows, place = own.stop - own.start, leg.sent - own.start
            else:
                num_rows, place = len(before.received), before.position(len(call.source))[leg.sent]
            by_rank = results.new_zeros(len(self._ranks.hosts), num_rows, results.shape[1])
            by_rank[leg.receivers, place] = results
            results = results.new_empty(by_rank.shape[1:])
            if num_rows:
                add_parts_launch(results, by_rank).run()
        return results

    def _send(self, x: Tensor, sizes: list[int], out_sizes: list[int]) -> _Exchanging:
        out = x.new_empty(sum(out_sizes), *x.shape[1:])
        transfer = self._ranks.communicator.begin_all_to_all(out, x.contiguous(), out_sizes, sizes)
        yield
        transfer.wait()
        return out


class _Call(NamedTuple):
    """Of a step: what the experts read, and the routes of all rows [T]; first: the number of the first row of x, None: x has
    all rows; owners [T, top_k]: the rank that computes each pair; source [T]: the rank that each row is from; adapters: as in
    `run`."""

    x: Tensor
    first: int | None
    routes: Routes
    owners: Tensor
    source: Tensor
    multiply: MultiplyPairs
    adapters: Tensor | None


def _in_turns(parts: list[_Exchanging]) -> list[Tensor]:
    """Run parts up to their next exchange in turns; return their results. While one computes, the other's rows are sent."""
    results: dict[int, Tensor] = {}
    while len(results) < len(parts):
        for index, part in enumerate(parts):
            if index not in results:
                try:
                    next(part)
                except StopIteration as ended:
                    results[index] = ended.value
    return [results[index] for index in range(len(parts))]
