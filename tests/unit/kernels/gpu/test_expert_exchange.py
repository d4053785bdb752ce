"""The exchange of rows between ranks that have whole experts, over gloo: sums, and bytes that are counted by hand."""

from types import SimpleNamespace

import pytest
import torch

from quire.kernels.triton.moe import Routes, add_pairs
from quire.model import device_experts
from quire.model.device_experts import ExpertExchange
from quire.model.device_ranks import DeviceRanks
from quire.parallel.communicator import CountingCommunicator
from tests.device_ranks import gloo_communicators, one_launch_at_a_time
from tests.ranks import run_threads
from tests.unit.kernels.gpu.conftest import HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="several ranks on one machine are interpreted, over gloo")

NUM_EXPERTS, TOP_K, WIDTH = 6, 3, 16
PLACEMENTS = {"two": [(0, 1, 2), (3, 4, 5)], "three": [(4,), (0, 1, 5), (2, 3)]}


class Exchange:
    """Ranks, each with an exchange; an expert multiplies rows by a row of its own."""

    def __init__(self, placement, is_in_order):
        self.inner = gloo_communicators(len(placement))
        self.counted = [CountingCommunicator(each) for each in self.inner]
        generator = torch.Generator().manual_seed(1)
        self.weights = torch.randn(NUM_EXPERTS, WIDTH, generator=generator)
        self.placement, self.exchanges = placement, []
        for rank, communicator in enumerate(self.counted):
            shard = SimpleNamespace(rank=rank, ranks=[SimpleNamespace(vocabulary=SimpleNamespace(size=1))] * len(placement))
            ranks = DeviceRanks(communicator, shard)
            self.exchanges.append(ExpertExchange(ranks, placement, TOP_K, is_in_order, torch.device("cpu")))

    def multiply(self, rank, rows, routes, adapters):
        shares, experts = (part.view(len(rows), TOP_K) for part in routes)
        own = self.weights[list(self.placement[rank])]
        found = rows[:, None] * own[experts.long().clamp(min=0)] * shares[..., None]
        found[experts < 0] = 0
        return found.view(-1, WIDTH)

    def run(self, x, routes):
        """Return what each rank returns, and how many bytes each has sent with all_to_all."""

        def act(rank):
            return self.exchanges[rank].run(x, routes, lambda *given: self.multiply(rank, *given))

        found = run_threads(len(self.exchanges), act)
        sent = [each.counts["all_to_all"].num_bytes if "all_to_all" in each.counts else 0 for each in self.counted]
        return found, sent

    def close(self):
        for each in self.inner:
            each.close()


def rows_and_routes(num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, WIDTH, generator=generator)
    experts = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:TOP_K] for _ in range(num_rows)])
    return x, Routes(torch.rand(num_rows * TOP_K, generator=generator), experts.flatten().to(torch.int32))


def expected_of(weights, x, routes):
    """Return what one rank with all experts gives."""
    return add_pairs(x.repeat_interleave(TOP_K, 0) * weights[routes.experts.long()] * routes.shares[:, None], TOP_K)


@pytest.fixture(autouse=True)
def in_turns(monkeypatch):
    one_launch_at_a_time(monkeypatch)
    monkeypatch.setattr(device_experts, "ORDERED_BYTES", 0)


@pytest.mark.parametrize("is_in_order", [True, False], ids=["in-order", "sums"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_rank_gets_the_sums_and_sends_each_row_once_to_each_other_rank(placement, is_in_order):
    group, owners = Exchange(PLACEMENTS[placement], is_in_order), torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    for rank, experts in enumerate(PLACEMENTS[placement]):
        owners[list(experts)] = rank
    size = len(PLACEMENTS[placement])
    num_copies = num_pairs = 0
    for num_rows in (7, 1, 12):  # with one row some ranks have none
        x, routes = rows_and_routes(num_rows, num_rows)
        found, sent = group.run(x, routes)
        for out, is_part in found:
            assert not is_part
            expected = expected_of(group.weights, x, routes)
            assert torch.equal(out, expected) if is_in_order else torch.allclose(out, expected, atol=1e-5)
        at = owners[routes.experts.long()].view(num_rows, TOP_K)
        num_copies += sum(len(set(row)) for row in at.tolist())
        num_pairs += num_rows * TOP_K
        told = 2 * TOP_K * 4
        back = num_pairs if is_in_order else num_copies
        assert sum(sent) == num_copies * (4 * WIDTH + told) + back * 4 * WIDTH
    assert num_copies < num_pairs * (size - 1) + 1
    group.close()


def test_nothing_is_sent_while_memory_is_measured():
    group = Exchange(PLACEMENTS["two"], True)
    x, routes = rows_and_routes(5)
    for each in group.exchanges:
        each._ranks.is_measuring = True
    (first, is_part), (second, _) = group.run(x, routes)[0]
    assert is_part
    assert torch.allclose(first + second, expected_of(group.weights, x, routes), atol=1e-5)
    assert group.run(x, routes)[1] == [0, 0]
    group.close()
