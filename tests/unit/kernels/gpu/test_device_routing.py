"""Routing on a device that evens out the load of experts, against one choice after the other, and what is counted."""

import math

import pytest
import torch

from quire.contracts.expert_options import LossyRouting
from quire.contracts.model_spec import MlpSpec, MoeSpec
from quire.kernels.triton.moe import ExpertExtras, Routes
from quire.model.device_routing import DeviceRouting, RealRows, read_counts
from tests.unit.kernels.gpu.conftest import HAS_GPU

NUM_EXPERTS, TOP_K = 8, 3
SPEC = MoeSpec(NUM_EXPERTS, TOP_K, MlpSpec(16, "silu"))
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def routing_of(lossy, slots):
    rows = RealRows()
    rows.begin(torch.tensor(slots, device=DEVICE))
    return DeviceRouting(SPEC, lossy, rows, None, DEVICE)


def skewed(num_rows, seed):
    """Return the logits of a router that likes some experts, and its routes."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, NUM_EXPERTS, generator=generator) + torch.linspace(1.5, 0, NUM_EXPERTS)
    weights, experts = logits.softmax(1).topk(TOP_K)
    return logits, Routes(weights.flatten(), experts.flatten().int())


def changed(routing, logits, routes):
    there = routing.watched(ExpertExtras(), logits.to(DEVICE), is_noted=False)
    return Routes(*(part.cpu() for part in there.change(Routes(*(part.to(DEVICE) for part in routes)))))


def one_by_one(logits, routes, factor):
    """Return experts and weights where each choice takes room in turn, by descending weight."""
    scores = logits.softmax(1)
    capacity = max(4, math.ceil(factor * len(routes.experts) / NUM_EXPERTS - 1e-6))
    room = [capacity] * NUM_EXPERTS
    experts, weights = routes.experts.view(-1, TOP_K).tolist(), routes.shares.view(-1, TOP_K).clone()
    for pair in routes.shares.argsort(descending=True, stable=True).tolist():
        row, choice = divmod(pair, TOP_K)
        before = experts[row][choice]
        if room[before] == 0:
            free = [e for e in range(NUM_EXPERTS) if room[e] and e not in experts[row]]
            best = max(free, key=lambda e: float(scores[row, e]), default=-1)
            weights[row, choice] *= 0.0 if best < 0 else scores[row, best] / scores[row, before]
            experts[row][choice] = best
        if experts[row][choice] >= 0:
            room[experts[row][choice]] -= 1
    return torch.tensor(experts), weights


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor", [1.0, 1.25, 8.0])
def test_what_is_over_the_capacity_goes_to_the_best_expert_with_room(factor, seed):
    logits, routes = skewed(40, seed)
    routing = routing_of(LossyRouting(capacity_factor=factor), range(40))
    found, wanted = changed(routing, logits, routes), one_by_one(logits, routes, factor)
    is_same = found.experts.view(-1, TOP_K) == wanted[0]
    assert is_same.all() if factor == 8 else is_same.float().mean() > 0.9
    torch.testing.assert_close(found.shares.view(-1, TOP_K)[is_same], wanted[1][is_same])
    (counts,) = read_counts([routing])
    moved, dropped, weak, use = counts.changes
    demand = routes.experts.bincount(minlength=NUM_EXPERTS)
    capacity = math.ceil(factor * 40 * TOP_K / NUM_EXPERTS)
    assert max(counts.tokens) <= capacity
    assert sum(counts.tokens) + dropped == 40 * TOP_K
    assert moved == int(((found.experts != routes.experts) & (found.experts >= 0)).sum())
    assert (moved > 0, weak) == (factor < 8, 0)
    assert use == pytest.approx(0.01 * int(demand.max()) / capacity)
    chosen = [[e for e in row if e >= 0] for row in found.experts.view(-1, TOP_K).tolist()]
    assert all(len(set(row)) == len(row) for row in chosen)


def test_padding_takes_no_room_and_is_not_counted():
    logits, routes = skewed(40, 1)
    lossy = LossyRouting(1.0, 0.01, 0.4)
    alone = routing_of(lossy, range(30))
    found = changed(alone, logits[:30], Routes(*(part[: 30 * TOP_K] for part in routes)))
    padded = routing_of(lossy, [*range(30), *[-1] * 10])
    both = changed(padded, logits, routes)
    assert torch.equal(both.experts[: 30 * TOP_K], found.experts)
    assert torch.equal(both.shares[: 30 * TOP_K], found.shares)
    assert both.experts[30 * TOP_K :].tolist() == [-1] * 30
    assert read_counts([None, padded]) == [None, *read_counts([alone])]
    only = routing_of(lossy, [-1] * 40)
    changed(only, logits, routes)
    assert read_counts([only])[0] == ([0] * NUM_EXPERTS, (0, 0, 0, 0.0))


def test_weak_choices_are_left_out():
    logits, routes = skewed(40, 2)
    routing = routing_of(LossyRouting(min_share=0.4), range(40))
    found = changed(routing, logits, routes)
    weights = routes.shares.view(-1, TOP_K)
    is_weak = weights < 0.4 * weights[:, :1]
    assert 0 < int(is_weak.sum()) == read_counts([routing])[0].changes[2]
    assert torch.equal(found.experts.view(-1, TOP_K), routes.experts.view(-1, TOP_K).masked_fill(is_weak, -1))
    assert torch.equal(found.shares.view(-1, TOP_K), weights.masked_fill(is_weak, 0))


def test_the_bias_of_busy_experts_falls_to_its_limit():
    logits, routes = skewed(40, 3)
    routing = routing_of(LossyRouting(bias_rate=0.03), range(40))
    counts = routes.experts.bincount(minlength=NUM_EXPERTS)
    direction = torch.sign(40 * TOP_K / NUM_EXPERTS - counts)
    for step in (0.0, 0.03, 0.05, 0.05):
        extra = routing.watched(ExpertExtras(), logits, is_noted=False)
        torch.testing.assert_close(extra.correction.cpu(), step * direction)
        changed(routing, logits, routes)
    assert read_counts([routing])[0].tokens == (4 * counts).tolist()
