"""DeviceRouting: counts the tokens of a layer's experts on a device, and changes the choices of tokens if routing is lossy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.contracts.expert_options import MAX_EXPERT_BIAS, LossyRouting
from quire.contracts.model_spec import MoeSpec
from quire.kernels.triton.moe import ExpertExtras, Routes

_LEAST_CAPACITY = 4  # as the native kernels have
_ROUNDS = 4
"""How often choices that have no room look for another expert; what has none then is left out."""


class RoutingCounts(NamedTuple):
    """Of one layer so far: tokens of each expert; and choices that were moved, dropped, or weak, and the use of capacity, as
    Plan.routing_counts of the native kernels has them."""

    tokens: list[int]
    changes: tuple[int, int, int, float]

    @classmethod
    def of(cls, counters: list[float]) -> RoutingCounts:
        """Return those that DeviceRouting.counters has."""
        moved, dropped, weak, use = counters[-4:]
        return cls([int(count) for count in counters[:-4]], (int(moved), int(dropped), int(weak), use))


class RealRows:
    """Which rows of the current step are no padding; shared by all layers."""

    def __init__(self) -> None:
        self._slots: Tensor | None = None
        self._pairs: dict[int, Tensor] = {}

    def begin(self, slots: Tensor) -> None:
        """Begin a step; slots: [T] where the KV of its tokens is stored, negative for padding."""
        self._slots = slots
        self._pairs.clear()

    def mask(self) -> Tensor:
        """Return [T] bool."""
        assert self._slots is not None
        return self._slots >= 0

    def pairs(self, top_k: int) -> Tensor:
        """Return [T * top_k] i64, 1 for the choices of rows that are no padding; made once in a step."""
        if top_k not in self._pairs:
            self._pairs[top_k] = self.mask().long().repeat_interleave(top_k)
        return self._pairs[top_k]


def read_counts(routings: Sequence[DeviceRouting | None]) -> list[RoutingCounts | None]:
    """Return the counts of layers, in one copy from the device; None of those that have none."""
    counters = [each.counters() for each in routings if each is not None]
    read = iter(torch.cat(counters).cpu().split([len(each) for each in counters]) if counters else ())
    return [None if each is None else RoutingCounts.of(next(read).tolist()) for each in routings]


class DeviceRouting:
    """Every rank has one for each layer, and does the same. All is done on the device, and may be part of a CUDA graph.

    With a capacity, choices take room by descending weight, as on a CPU. Those that find none move at the same time, each to
    the best expert that has room for it, several of one row to the best, the second best and so on; up to _ROUNDS times. On a
    CPU they move one after the other and try all experts, so a few choices differ.
    """

    def __init__(
        self, spec: MoeSpec, lossy: LossyRouting, rows: RealRows, correction: Tensor | None, device: torch.device
    ) -> None:
        self._spec, self._lossy, self._rows = spec, lossy, rows
        self._base = correction
        self._bias = torch.zeros(spec.num_experts, device=device)
        self._tokens = torch.zeros(spec.num_experts, dtype=torch.int64, device=device)
        self._pairs: Tensor | None = None
        self._changes = torch.zeros(4, dtype=torch.float64, device=device)
        self._experts = torch.arange(spec.num_experts, device=device)

    def watched(self, extra: ExpertExtras, logits: Tensor, is_noted: bool) -> ExpertExtras:
        """Return parameters with which choices of a step are changed, and counted.

        logits    [T, E] of the router, for all rows if routing is lossy
        is_noted  another caller of `note` counts them
        """
        if is_noted and not self._lossy:
            return extra

        def change(routes: Routes) -> Routes:
            routes = self._change(routes, logits, extra.scale) if self._lossy else routes
            if not is_noted:
                self.note(routes.experts)
            return routes

        return replace(extra, correction=self._correction, change=change)

    @property
    def _correction(self) -> Tensor | None:
        """[E], what is added to the scores for selection; None: nothing."""
        if not self._lossy.bias_rate:
            return self._base
        return self._bias if self._base is None else self._base + self._bias

    def count_pairs(self) -> None:
        """Count from now on the tokens that choose two experts."""
        self._pairs = torch.zeros(len(self._tokens), len(self._tokens), dtype=torch.int64, device=self._tokens.device)

    @property
    def pairs(self) -> Tensor | None:
        """[E, E] i64 of the tokens so far, on the diagonal those of each expert; None: they are not counted."""
        return self._pairs

    def counters(self) -> Tensor:
        """Return the counts of the layer, f64 [E + 4] on the device."""
        return torch.cat((self._tokens.double(), self._changes))

    def note(self, experts: Tensor) -> None:
        """Count the choices [P] of all rows of a step, and adapt the bias."""
        is_counted = self._rows.pairs(self._spec.top_k)
        if self._pairs is not None:
            chosen = torch.zeros(len(experts) // self._spec.top_k, len(self._tokens), device=experts.device)
            marks = (is_counted * (experts >= 0)).float().view(-1, self._spec.top_k)
            chosen.scatter_add_(1, experts.clamp(min=0).long().view(-1, self._spec.top_k), marks)
            self._pairs += (chosen.T @ chosen).long()  # exact: a step has fewer tokens than 2 ** 24
        if not self._lossy:
            self._tokens.index_add_(0, experts, is_counted)
            return
        counts = torch.zeros_like(self._tokens).index_add_(0, experts.clamp(min=0), is_counted * (experts >= 0))
        self._tokens += counts
        if self._lossy.bias_rate:
            # In integers: a GPU divides by a number by multiplying with its reciprocal.
            self._bias.add_(torch.sign(counts.sum() - counts * len(counts)), alpha=self._lossy.bias_rate).clamp_(
                -MAX_EXPERT_BIAS, MAX_EXPERT_BIAS
            )

    def _change(self, routes: Routes, logits: Tensor, scale: Tensor | None) -> Routes:
        """Return the choices that lossy routing makes of those of a step; scale: see ExpertExtras."""
        top_k = self._spec.top_k
        weights, chosen = routes.shares.view(-1, top_k), routes.experts.view(-1, top_k).long()
        is_real = self._rows.mask()
        chosen = chosen.masked_fill(~is_real[:, None], -1)
        if self._lossy.min_share:
            is_weak = (weights < self._lossy.min_share * weights.amax(1, keepdim=True)) & (chosen >= 0)
            self._changes[2] += is_weak.sum()
            chosen, weights = chosen.masked_fill(is_weak, -1), weights.masked_fill(is_weak, 0.0)
        if self._lossy.capacity_factor:
            read = logits.float()
            scores = read.softmax(-1) if self._spec.scoring == "softmax" else read.sigmoid()
            correction = self._correction
            wanted = scores if correction is None else scores + correction
            chosen, weights = self._limit(chosen, weights, scores if scale is None else scores * scale, wanted, is_real.sum())
        return Routes(weights.flatten().contiguous(), chosen.flatten().to(torch.int32))

    def _limit(
        self, chosen: Tensor, weights: Tensor, scores: Tensor, wanted: Tensor, num_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return choices and weights [T, K] where no expert has more than its capacity."""
        top_k, num_experts = self._spec.top_k, self._spec.num_experts
        mean = num_rows.double() * top_k / num_experts
        capacity = (self._lossy.capacity_factor * mean - 1e-6).ceil().clamp(min=_LEAST_CAPACITY)
        order = weights.nan_to_num(0.0).flatten().argsort(descending=True, stable=True)
        turn = torch.empty_like(order)
        turn[order] = torch.arange(len(order), device=order.device)
        turn, rows = turn.view(-1, top_k), order // top_k
        now = chosen
        for attempt in range(_ROUNDS + 1):
            taken = now.flatten()[order]
            ahead = (taken[:, None] == self._experts).cumsum(0)  # [P, E] choices of each expert that come before, this included
            if attempt == 0:
                self._note_use(ahead[-1].amax() / capacity, num_rows)
            is_over = torch.zeros_like(turn, dtype=torch.bool)
            is_over.view(-1)[order] = (taken >= 0) & (ahead.gather(1, taken.clamp(min=0)[:, None])[:, 0] > capacity)
            if attempt == _ROUNDS:
                now = now.masked_fill(is_over, -1)
                break
            is_chosen = (now[:, :, None] == self._experts).any(1)
            has_room = (ahead < capacity) & ~is_chosen[rows]
            best = wanted[rows].masked_fill(~has_room, -torch.inf).topk(min(top_k, num_experts))
            # Of several choices of a row that move, the first takes the best expert, the next one the second best.
            place = (is_over[:, None] & (turn[:, None] < turn[:, :, None])).sum(2).flatten()[order, None]
            found = best.indices.gather(1, place).masked_fill(best.values.gather(1, place) == -torch.inf, -1)
            moved = torch.empty_like(now)
            moved.view(-1)[order] = found[:, 0]
            now = moved.where(is_over, now)
        is_moved, is_dropped = (now != chosen) & (now >= 0), (now < 0) & (chosen >= 0)
        self._changes[0] += is_moved.sum()
        self._changes[1] += is_dropped.sum()
        before = scores.gather(1, chosen.clamp(min=0))
        ratio = (scores.gather(1, now.clamp(min=0)) / before).masked_fill(before <= 0, 0.0)
        return now, weights.masked_fill(is_dropped, 0.0).where(~is_moved, weights * ratio)

    def _note_use(self, use: Tensor, num_rows: Tensor) -> None:
        """Take the demand of a step's busiest expert over its capacity into the mean, unless all rows are padding."""
        self._changes[3] += (0.01 * (use - self._changes[3])).where(num_rows > 0, 0.0)
