"""Random steps of sequences with homes: all ranks make the same collectives, in the same order, whose sizes fit together."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.kernels.triton.moe import Routes
from quire.model import device_experts, device_ranks
from quire.model.device_experts import ExpertExchange
from quire.model.device_ranks import DeviceRanks
from quire.parallel.expert_placement import ExpertPlacement
from quire.worker.device.homes import Homes, by_home
from quire.worker.device.host_step import HostStep

NUM_EXPERTS, TOP_K, WIDTH = 8, 2, 4
PLACEMENTS = [
    (((0, 1, 2, 3), (4, 5, 6, 7)), (0, 0)),
    (((0, 1, 2), (2, 3, 4, 5), (6, 7)), (0, 0, 1)),
    (((0, 1), (2, 3), (4, 5), (6, 7)), (0, 1, 0, 1)),
]
"""The experts and the host of each rank."""


class Recording:
    """Notes the calls of a rank; what a gather of routes gives is known."""

    def __init__(self, rank, size):
        self.rank, self.size, self.calls, self.told = rank, size, [], None

    def all_gather(self, out, part, sizes=None):
        self.calls.append(("all_gather", out.nbytes, tuple(sizes or ())))
        out.copy_(self.told) if out.dtype == torch.int32 else out.zero_()

    def reduce_scatter(self, out, part, sizes):
        self.calls.append(("reduce_scatter", part.nbytes, tuple(sizes)))

    def all_reduce(self, part, in_order=True):
        self.calls.append(("all_reduce", part.nbytes))

    def begin_all_to_all(self, out, x, out_sizes, sizes):
        self.calls.append(("all_to_all", x[:0].new_empty(1, *x.shape[1:]).nbytes, tuple(sizes), tuple(out_sizes)))
        return SimpleNamespace(wait=out.zero_)


class Sequences:
    """Sequences that are admitted, computed, preempted and end at random; homes are often empty."""

    def __init__(self, rng, num_homes):
        self._rng, self._num_homes, self._alive = rng, num_homes, []

    def step(self):
        """Return the tokens of each sequence in the next step, and its home."""
        rng = self._rng
        while not self._alive or (rng.random() < 0.3 and len(self._alive) < 10):
            self._alive.append([rng.randrange(self._num_homes), rng.randint(1, 12), rng.randint(1, 9)])
        if rng.random() < 0.1:  # computed anew at another home
            self._alive[rng.randrange(len(self._alive))][:2] = rng.randrange(self._num_homes), rng.randint(1, 12)
        counts = [min(uncomputed, 5) for _, uncomputed, _ in self._alive]
        homes = [home for home, _, _ in self._alive]
        for sequence, count in zip(self._alive, counts, strict=True):
            sequence[1] = max(1, sequence[1] - count)
            sequence[2] -= sequence[1] == 1
        self._alive = [each for each in self._alive if each[2] > 0]
        return counts, homes


def host_step(counts, homes):
    tokens, sequences = np.zeros(sum(counts), np.int64), np.zeros(len(counts), np.int32)
    ends = np.cumsum(counts) - 1
    return HostStep(
        tuple(counts), sequences, sequences + 1, tokens, tokens, tokens, ends, sequences, ends, homes=np.array(homes, np.int64)
    )


def run_rank(exchange, ranks, sizes, routes):
    """Make the collectives of a step of one layer, as DeviceDecoder does: embedding, experts, hidden states."""
    x = torch.zeros(sum(sizes), WIDTH)
    ranks.sum_parts(x)
    with ranks.divided_rows(x, sizes) as own:
        has_own_rows = exchange.takes_own_rows(own)
        rows = ranks.own_rows(len(x))
        at = slice(rows.start * TOP_K, rows.stop * TOP_K)
        given = Routes(routes.shares[at], routes.experts[at]) if has_own_rows else routes
        read = own if has_own_rows else ranks.gather_rows(own)
        out, is_part = exchange.run(read, given, lambda x, routes, adapters: x.new_zeros(len(x) * TOP_K, WIDTH))
        ranks.gather_rows(ranks.sum_parts(out) if is_part else out)


@pytest.mark.parametrize("num_steps", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_ranks_make_the_same_collectives_in_random_steps_with_homes(num_steps, monkeypatch):
    launch = SimpleNamespace(run=lambda: None)
    for module in (device_ranks, device_experts):
        monkeypatch.setattr(module, "add_parts_launch", lambda *given: launch)
        monkeypatch.setattr(module, "ORDERED_BYTES", 24 * WIDTH * 4)  # rows beyond which they are sent
    monkeypatch.setattr(device_experts, "HALVES_ROWS", 6)
    monkeypatch.setattr(device_experts, "add_pairs", lambda pairs, top_k: pairs[::top_k])
    rng, generator, kinds, num_empty = random.Random(num_steps), torch.Generator().manual_seed(0), set(), 0
    groups = []
    for placement, hosts in PLACEMENTS:
        recorded = [Recording(rank, len(hosts)) for rank in range(len(hosts))]
        part = SimpleNamespace(vocabulary=SimpleNamespace(size=1))
        shards = [SimpleNamespace(rank=rank, ranks=[part] * len(hosts)) for rank in range(len(hosts))]
        ranks = [DeviceRanks(*each, hosts) for each in zip(recorded, shards, strict=True)]
        placed = ExpertPlacement(NUM_EXPERTS, placement)
        exchanges = [ExpertExchange(each, placed, TOP_K, len(hosts) == 3, torch.device("cpu")) for each in ranks]
        groups.append((recorded, ranks, exchanges, Sequences(rng, len(hosts))))
    for number in range(num_steps):
        recorded, ranks, exchanges, sequences = groups[number % len(groups)]
        step = host_step(*sequences.step())
        most = np.bincount(step.homes).max() if step.is_decode else None
        num_empty += len(set(step.homes.tolist())) < len(ranks)
        arranged, order = by_home(step, Homes(0, len(ranks)), 0, most)
        ends = np.cumsum((0, *order.sequences))
        sizes = [sum(arranged.counts[start:stop]) for start, stop in itertools.pairwise(ends)]
        experts = torch.rand(sum(sizes), NUM_EXPERTS, generator=generator).topk(TOP_K).indices.flatten().int()
        routes = Routes(torch.rand(len(experts), generator=generator), experts)
        for each, own, exchange in zip(recorded, ranks, exchanges, strict=True):
            each.calls.clear()
            each.told = torch.stack((routes.experts, routes.shares.view(torch.int32)), 1).view(-1, 2 * TOP_K)
            run_rank(exchange, own, sizes, routes)
        for calls in zip(*(each.calls for each in recorded), strict=True):
            assert len({call[:2] for call in calls}) == 1
            kinds.add(calls[0][0])
            if calls[0][0] == "all_to_all":
                sent, received = (np.array([call[way] for call in calls]) for way in (2, 3))
                assert (sent == received.T).all()
            else:
                assert len(set(calls)) == 1
    assert kinds == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
    assert num_empty > num_steps // 20
