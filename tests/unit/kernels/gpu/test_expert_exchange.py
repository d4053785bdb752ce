"""The exchange of rows between ranks that have whole experts, over gloo: sums, bytes counted by hand, and its order."""

from types import SimpleNamespace

import pytest
import torch

from quire.kernels.triton.float8 import pack_rows_launch
from quire.kernels.triton.moe import Routes, add_pairs
from quire.model import device_experts
from quire.model.device_experts import ExpertExchange
from quire.model.device_ranks import DeviceRanks
from quire.parallel.expert_placement import ExpertPlacement
from quire.planner import expert_exchange
from tests.device_ranks import gloo_communicators, one_launch_at_a_time
from tests.ranks import run_threads
from tests.unit.kernels.gpu.conftest import HAS_GPU, draw

pytestmark = pytest.mark.skipif(HAS_GPU, reason="several ranks on one machine are interpreted, over gloo")

NUM_EXPERTS, TOP_K, WIDTH = 6, 3, 16
ROW_BYTES = 4 * WIDTH
FLOAT8_BYTES = 32  # of 16 codes, a scale of four bytes, and what pads them
PLACEMENTS = {
    "two": ((0, 1, 2), (3, 4, 5)),
    "three": ((4,), (0, 1, 5), (2, 3)),
    "four-with-copies": ((0, 1), (0, 2, 3), (1, 4), (0, 5)),
}


class Noting:
    """Passes on what a rank exchanges, and notes the bytes that go to each rank, and the order of events."""

    def __init__(self, inner):
        self._inner, self.rank, self.size = inner, inner.rank, inner.size
        self.sent, self.events = [0] * inner.size, []

    def all_gather(self, out, part, sizes=None):
        self._inner.all_gather(out, part, sizes)

    def begin_all_to_all(self, out, x, out_sizes, sizes):
        for other, count in enumerate(sizes):
            self.sent[other] += count * x[:0].new_empty(1, *x.shape[1:]).nbytes
        self.events.append("begin")
        transfer = self._inner.begin_all_to_all(out, x, out_sizes, sizes)
        return SimpleNamespace(wait=lambda: (self.events.append("wait"), transfer.wait()))


class Exchange:
    """Ranks, each with an exchange; an expert multiplies rows, which may be rounded to float8, by a row of its own."""

    def __init__(self, placement, is_in_order, hosts=None, is_divided=False, is_float8=False):
        self._form = (lambda rows, num_rows: packed(rows)) if is_float8 else None
        self._inner = gloo_communicators(len(placement))
        self.noting, self._is_divided = [Noting(each) for each in self._inner], is_divided
        self.weights = draw(NUM_EXPERTS, WIDTH, seed=1)
        self._placement, self.exchanges, self.ranks = placement, [], []
        for rank, communicator in enumerate(self.noting):
            shard = SimpleNamespace(rank=rank, ranks=[SimpleNamespace(vocabulary=SimpleNamespace(size=1))] * len(placement))
            self.ranks.append(DeviceRanks(communicator, shard, hosts))
            placed = ExpertPlacement(NUM_EXPERTS, placement)
            self.exchanges.append(ExpertExchange(self.ranks[-1], placed, TOP_K, is_in_order, torch.device("cpu")))

    def _multiply(self, rank, rows, routes, adapters):
        self.noting[rank].events.append("multiply")
        shares, experts = (part.view(len(rows), TOP_K) for part in routes)
        own, rows = self.weights[list(self._placement[rank])], unpacked(rows)
        found = rows[:, None] * own[experts.long().clamp(min=0)] * shares[..., None]
        found[experts < 0] = 0
        return found.view(-1, WIDTH)

    def run(self, x, routes):
        """Return the outputs of all rows, and whether they are parts of a sum, of each rank."""

        def act(rank):
            exchange, ranks = self.exchanges[rank], self.ranks[rank]
            if not self._is_divided:
                return exchange.run(x, routes, lambda *given: self._multiply(rank, *given), form=self._form)
            with ranks.divided_rows(x) as own:
                rows = ranks.own_rows(len(x))
                pairs = slice(rows.start * TOP_K, rows.stop * TOP_K)
                given = Routes(routes.shares[pairs], routes.experts[pairs])
                out, is_part = exchange.run(own, given, lambda *given: self._multiply(rank, *given), form=self._form)
                return ranks.gather_rows(out), is_part

        return run_threads(len(self.exchanges), act)

    def close(self):
        for each in self._inner:
            each.close()


def packed(rows):
    launch, found = pack_rows_launch(rows, WIDTH)
    launch.run()
    return found


def unpacked(rows):
    """Return rows in f32."""
    return (
        rows
        if rows.dtype == torch.float32
        else rows[:, :WIDTH].view(torch.float8_e4m3fn).float() * rows.view(torch.float32)[:, 4:5]
    )


def rows_and_routes(num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, WIDTH, generator=generator)
    experts = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:TOP_K] for _ in range(num_rows)])
    return x, Routes(torch.rand(num_rows * TOP_K, generator=generator), experts.flatten().to(torch.int32))


def expected_of(weights, x, routes):
    """Return what one rank with all experts gives."""
    return add_pairs(x.repeat_interleave(TOP_K, 0) * weights[routes.experts.long()] * routes.shares[:, None], TOP_K)


def ranks_of(placement, routes, num_rows):
    """Return for each row the ranks that compute its pairs: the copies of an expert take turns by row."""
    holders = [[rank for rank, own in enumerate(placement) if expert in own] for expert in range(NUM_EXPERTS)]
    chosen = routes.experts.view(num_rows, TOP_K).tolist()
    return [[holders[e][row % len(holders[e])] for e in experts] for row, experts in enumerate(chosen)]


@pytest.fixture(autouse=True)
def in_turns(monkeypatch):
    one_launch_at_a_time(monkeypatch)
    monkeypatch.setattr(device_experts, "ORDERED_BYTES", 0)


def check(group, x, routes, is_in_order, is_float8=False):
    expected = expected_of(group.weights, unpacked(packed(x)) if is_float8 else x, routes)
    for out, is_part in group.run(x, routes):
        assert not is_part
        assert torch.equal(out, expected) if is_in_order else torch.allclose(out, expected, atol=1e-5)


@pytest.mark.covering(strength=2)
@pytest.mark.parametrize("is_in_order", [True, False], ids=["in-order", "sums"])
@pytest.mark.parametrize("is_divided", [False, True], ids=["all-rows", "divided"])
@pytest.mark.parametrize("halves_rows", [256, 1], ids=["whole", "halves"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("is_float8", [False, True], ids=["f32", "float8"])
def test_every_rank_gets_the_sums_and_sends_each_row_once_to_each_rank(
    is_float8, placement, halves_rows, is_divided, is_in_order, monkeypatch
):
    monkeypatch.setattr(device_experts, "HALVES_ROWS", halves_rows)
    placed = PLACEMENTS[placement]
    group = Exchange(placed, is_in_order, is_divided=is_divided, is_float8=is_float8)
    num_bytes = 0
    for num_rows in (7, 1, 12):  # with one row some ranks have none
        x, routes = rows_and_routes(num_rows, num_rows)
        check(group, x, routes, is_in_order, is_float8)
        num_copies = sum(len(set(at)) for at in ranks_of(placed, routes, num_rows))
        num_back = num_rows * TOP_K if is_in_order else num_copies
        num_bytes += num_copies * is_divided * (FLOAT8_BYTES if is_float8 else ROW_BYTES) + num_back * ROW_BYTES
    assert sum(sum(each.sent) for each in group.noting) == num_bytes
    group.close()


@pytest.mark.parametrize("is_in_order", [True, False], ids=["in-order", "sums"])
@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 1, 0)], ids=str)
def test_a_row_crosses_once_to_each_other_host(hosts, is_in_order, monkeypatch):
    is_float8 = hosts[1] == 1
    monkeypatch.setattr(device_experts, "HALVES_ROWS", 3)
    placed, num_rows = PLACEMENTS["four-with-copies"], 13
    group = Exchange(placed, is_in_order, hosts, is_divided=True, is_float8=is_float8)
    x, routes = rows_and_routes(num_rows)
    check(group, x, routes, is_in_order, is_float8)
    num_there = num_back = 0
    for row, at in enumerate(ranks_of(placed, routes, num_rows)):
        own = next(host for rank, host in enumerate(hosts) if rank * num_rows // 4 <= row < (rank + 1) * num_rows // 4)
        elsewhere = [hosts[rank] for rank in at if hosts[rank] != own]
        num_there += len(set(elsewhere))
        num_back += len(elsewhere) if is_in_order else len(set(elsewhere))
    crossed = sum(each.sent[to] for each in group.noting for to in range(4) if hosts[to] != hosts[each.rank])
    assert crossed == num_there * (FLOAT8_BYTES if is_float8 else ROW_BYTES) + num_back * ROW_BYTES
    group.close()


def test_a_half_is_on_its_way_while_the_other_is_multiplied(monkeypatch):
    monkeypatch.setattr(device_experts, "HALVES_ROWS", 4)
    group = Exchange(PLACEMENTS["two"], True, is_divided=True)
    check(group, *rows_and_routes(7), True)  # fewer than four rows of a rank
    assert group.noting[0].events == ["begin", "wait", "multiply", "begin", "wait"]
    group.noting[0].events.clear()
    check(group, *rows_and_routes(8), True)
    first = ["begin", "begin", "wait", "multiply", "begin", "wait", "multiply", "begin", "wait", "wait"]
    assert group.noting[0].events == first
    group.close()


def test_the_simulation_knows_from_how_many_rows_on_there_are_halves():
    assert expert_exchange.HALVES_ROWS == device_experts.HALVES_ROWS


def test_nothing_is_sent_while_memory_is_measured():
    group = Exchange(PLACEMENTS["two"], True)
    x, routes = rows_and_routes(5)
    for each in group.ranks:
        each.is_measuring = True
    (first, is_part), (second, _) = group.run(x, routes)
    assert is_part
    assert torch.allclose(first + second, expected_of(group.weights, x, routes), atol=1e-5)
    assert [each.events for each in group.noting] == [["multiply"]] * 2
    group.close()
