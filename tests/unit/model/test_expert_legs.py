"""Legs of exchanges of experts: in random steps the ranks make the same collectives, whose sizes fit together."""

from __future__ import annotations

import pytest
import torch

from quire.model.expert_legs import LegMaker

HOSTS = [(0, 0), (0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1)]


def collectives_of(legs):
    """Return the exchanges of a step of one rank, there and back: the rows of each, to and from every rank."""
    there = [(leg.sizes, leg.out_sizes) for part in legs for leg in part]
    back = [(leg.out_sizes, leg.sizes) for part in legs for leg in reversed(part)]
    pairs = [(leg.pair_out_sizes, leg.pair_sizes) for part in legs for leg in reversed(part)]
    return [*there, *back, *pairs]


@pytest.mark.parametrize("num_steps", [60, pytest.param(4000, marks=pytest.mark.slow)])
def test_ranks_make_the_same_collectives_in_random_steps(num_steps):
    generator = torch.Generator().manual_seed(num_steps)
    cpu = torch.device("cpu")
    groups = [[LegMaker(rank, hosts, cpu) for rank in range(len(hosts))] for hosts in HOSTS]
    for step in range(num_steps):
        makers = groups[step % len(groups)]
        size = len(makers)
        num_rows, top_k = torch.randint(1, 7, (2,), generator=generator).tolist()
        owners = torch.randint(0, size, (num_rows, top_k), generator=generator)
        num_pairs = torch.nn.functional.one_hot(owners, size).sum(1)
        source = ((torch.arange(num_rows) + 1) * size - 1) // num_rows
        is_first = torch.rand(num_rows, generator=generator) < 0.5
        parts = [is_first, ~is_first] if step % 3 else [is_first | True]
        found = [collectives_of(maker.make(num_pairs, source, parts)) for maker in makers]
        assert len({len(each) for each in found}) == 1
        for exchange in zip(*found, strict=True):
            sent, received = (torch.tensor([rank[way] for rank in exchange]) for way in (0, 1))
            assert torch.equal(sent, received.T)
