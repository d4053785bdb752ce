"""Every collective against numpy, for groups of one to five ranks, uneven and empty parts, in every dtype."""

from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.base.errors import InvariantError
from quire.contracts.rank_stats import CollectiveStats
from quire.kernels.native import load_native
from quire.parallel.communicator import CountingCommunicator
from quire.parallel.torch_communicator import TorchCommunicator
from tests.ranks import SharedGroup, run_threads, start_processes, statuses_of

needs_native = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn]
names = {torch.float8_e4m3fn: "float8"}
dtype_id = [names.get(dtype, str(dtype).removeprefix("torch.")) for dtype in DTYPES]


def gloo_communicators(size):
    """A group of gloo in one process: each rank connects in a thread of its own."""
    store = torch.distributed.HashStore()

    def connect(rank):
        return TorchCommunicator.gloo(store, rank, size, timedelta(seconds=20), interface="lo")

    return run_threads(size, connect)


def communicators(kind, size):
    if kind == "gloo":
        return gloo_communicators(size)
    group = SharedGroup(size)
    return [group.communicator(rank) for rank in range(size)]


GROUPS = [
    *[pytest.param(("shm", size), marks=needs_native) for size in (1, 2, 3, 5)],
    ("gloo", 2),
    pytest.param(("gloo", 3), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def group(request):
    return communicators(*request.param)


def values(seed, shape, dtype):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * 3).to(dtype)
    return torch.randint(0, 20, shape, generator=generator, dtype=dtype)


def random_rows(seed, size):
    """Rows of each rank: some 0, some of several slots."""
    rng = np.random.default_rng(seed)
    return [int(rng.choice([0, 1, 3, 17, 500])) for _ in range(size)]


def assert_bits(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if got.numel():
        np.testing.assert_array_equal(got.view(torch.uint8).numpy(), expected.view(torch.uint8).numpy())


def ordered_sum(parts):
    """The reference, in numpy: f32 from the left, rounded once."""
    if not parts[0].is_floating_point():
        return torch.from_numpy(sum(part.numpy() for part in parts[1:]) + parts[0].numpy()).to(parts[0].dtype)
    total = parts[0].float().numpy().copy()
    for part in parts[1:]:
        total = total + part.float().numpy()
    return torch.from_numpy(total).to(parts[0].dtype)


def run(group, body):
    return run_threads(len(group), lambda rank: body(group[rank], rank))


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("seed", range(2))
def test_all_gather(group, dtype, seed):
    rows = random_rows(seed, len(group))
    parts = [values(rank, (count, 7), dtype) for rank, count in enumerate(rows)]

    def body(communicator, rank):
        out = values(99, (sum(rows), 7), dtype)
        communicator.all_gather(out, parts[rank], rows)
        assert_bits(out, torch.cat([part.view(torch.uint8) for part in parts]).view(dtype))

    run(group, body)


def test_all_gather_of_equal_parts_needs_no_sizes(group):
    def body(communicator, rank):
        out = torch.empty(2 * len(group), 3)
        communicator.all_gather(out, torch.full((2, 3), float(rank)))
        assert out.tolist() == [[float(row // 2)] * 3 for row in range(2 * len(group))]

    run(group, body)


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", [(0,), (1,), (33,), (3, 1100)], ids=str)
def test_all_reduce_adds_in_the_order_of_ranks(group, dtype, shape):
    parts = [values(rank, shape, dtype) for rank in range(len(group))]
    expected = ordered_sum(parts)

    def body(communicator, rank):
        x = parts[rank].clone()
        communicator.all_reduce(x)
        assert_bits(x, expected)

    run(group, body)


def test_all_reduce_of_specials(group):
    special = torch.tensor([float("inf"), float("nan"), -0.0, 3.3895e38, 1e-40, 65504.0])

    def body(communicator, rank):
        for dtype in (torch.float32, torch.bfloat16):
            x = special.to(dtype) if rank == 0 else torch.zeros(6, dtype=dtype)
            communicator.all_reduce(x)
            total = special.to(dtype) + 0.0 if len(group) > 1 else special.to(dtype)
            np.testing.assert_array_equal(x.float().numpy(), total.float().numpy())

    run(group, body)


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("seed", range(2))
def test_reduce_scatter(group, dtype, seed):
    rows = random_rows(seed + 10, len(group))
    parts = [values(rank, (sum(rows), 5), dtype) for rank in range(len(group))]
    expected = ordered_sum(parts)

    def body(communicator, rank):
        out = values(99, (rows[rank], 5), dtype)
        communicator.reduce_scatter(out, parts[rank], rows)
        assert_bits(out, expected[sum(rows[:rank]) : sum(rows[: rank + 1])].contiguous())

    run(group, body)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("seed", range(2))
def test_all_to_all(group, dtype, seed):
    size = len(group)
    rows = [random_rows(100 * seed + rank, size) for rank in range(size)]  # [from][to]
    sent = [[values(10 * rank + to, (rows[rank][to], 3), dtype) for to in range(size)] for rank in range(size)]

    def body(communicator, rank):
        incoming = [rows[other][rank] for other in range(size)]
        out = values(99, (sum(incoming), 3), dtype)
        joined = torch.cat([part.view(torch.uint8) for part in sent[rank]]).view(dtype)
        communicator.all_to_all(out, joined, incoming, rows[rank])
        expected = torch.cat([sent[other][rank].view(torch.uint8) for other in range(size)]).view(dtype)
        assert_bits(out, expected)
        outs = [values(99, out.shape, dtype) for _ in range(2)]
        transfers = [communicator.begin_all_to_all(each, joined, incoming, rows[rank]) for each in outs]
        for transfer, each in zip(transfers, outs, strict=True):
            transfer.wait()
            assert_bits(each, expected)

    run(group, body)


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("count", [0, 1, 3001])
def test_broadcast(group, dtype, count):
    expected = [values(source, (count,), dtype) for source in range(len(group))]

    def body(communicator, rank):
        for source in range(len(group)):
            x = expected[source].clone() if rank == source else values(99, (count,), dtype)
            communicator.broadcast(x, source)
            assert_bits(x, expected[source])

    run(group, body)


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("count", [0, 1, 3001])
def test_send_and_recv_round_a_ring(group, dtype, count):
    size = len(group)
    if size == 1:
        pytest.skip("there is nobody to send to")

    def body(communicator, rank):
        x, got = values(rank, (count,), dtype), values(99, (count,), dtype)
        if rank == 0:
            communicator.send(x, 1)
            communicator.recv(got, size - 1)
        else:
            communicator.recv(got, rank - 1)
            communicator.send(x, (rank + 1) % size)
        assert_bits(got, values((rank - 1) % size, (count,), dtype))

    run(group, body)


@pytest.mark.covering
def test_mixed_calls_do_not_disturb_each_other(group):
    """Many small calls one after the other, of random kinds: a slot that is written too early would show."""
    size, kinds = len(group), np.random.default_rng(5).integers(0, 5, 60)

    def body(communicator, rank):
        for turn, kind in enumerate(kinds):
            x = torch.arange(40, dtype=torch.float32) + rank * 100 + turn
            if kind == 0:
                communicator.all_reduce(x)
                base = torch.arange(40, dtype=torch.float32) + turn
                assert torch.equal(x, base * size + 100 * (size * (size - 1) // 2))
            elif kind == 1:
                out = torch.empty(size * 40)
                communicator.all_gather(out, x)
                assert out[::40].tolist() == [other * 100 + turn for other in range(size)]
            elif kind == 2:
                communicator.broadcast(x, turn % size)
                assert x[0] == turn % size * 100 + turn
            elif kind == 3:
                communicator.barrier()
            else:
                out = torch.empty(size)
                communicator.all_to_all(out, x[:size].contiguous(), [1] * size, [1] * size)
                assert out.tolist() == [other * 100 + turn + rank for other in range(size)]

    run(group, body)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.all_gather(torch.empty(3), torch.empty(2), [1] * c.size),
        lambda c: (
            c.all_gather(torch.empty(3), torch.empty(2), [1]) if c.size > 1 else c.all_gather(torch.empty(3), torch.empty(1))
        ),
        lambda c: c.reduce_scatter(torch.empty(2), torch.empty(7)),
        lambda c: c.all_to_all(torch.empty(2), torch.empty(2), [2] * (c.size + 1), [2] * c.size),
        lambda c: c.broadcast(torch.empty(2), c.size),
        lambda c: c.send(torch.empty(2), c.rank),
        lambda c: c.recv(torch.empty(2), -1),
    ],
    ids=["part", "sizes", "rows", "all-to-all", "source", "to-itself", "from-nobody"],
)
def test_calls_that_do_not_fit_are_refused_before_anything_is_sent(group, call):
    with pytest.raises(InvariantError):
        call(group[0])


@needs_native
def test_sizes_that_do_not_agree_are_an_error_on_every_rank():
    group = SharedGroup(3)
    errors = []

    def body(rank):
        sizes = [1, 1, 2] if rank == 1 else [1, 1, 1]  # rank 1 sends 2 rows to rank 2, which expects 1
        try:
            group.communicator(rank).all_to_all(torch.empty(3), torch.empty(sum(sizes)), [1, 1, 1], sizes)
        except ValueError as error:
            errors.append(str(error))

    run_threads(3, body)
    assert len(errors) == 3
    assert all("rank 1" in error for error in errors)


@needs_native
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_exchange_like_threads(size):
    group = SharedGroup(size)

    def body(rank):
        communicator = group.communicator(rank)
        for turn in range(20):
            rows = random_rows(turn, size)
            parts = [values(turn * 10 + other, (sum(rows), 5), torch.bfloat16) for other in range(size)]
            out = torch.empty(rows[rank], 5, dtype=torch.bfloat16)
            communicator.reduce_scatter(out, parts[rank], rows)
            gathered = torch.empty(sum(rows), 5, dtype=torch.bfloat16)
            communicator.all_gather(gathered, out, rows)
            x = parts[rank].clone()
            communicator.all_reduce(x)
            expected = ordered_sum(parts)
            if not (torch.equal(gathered, expected) and torch.equal(x, expected)):
                return 1
            if rank == 0:
                communicator.send(x, size - 1)
            elif rank == size - 1:
                communicator.recv(out := torch.empty_like(x), 0)
                if not torch.equal(out, expected):
                    return 2
        return 0

    assert statuses_of(start_processes(size, body)) == [0] * size


@needs_native
def test_counting_communicator_counts_calls_and_bytes():
    group = SharedGroup(2)
    counting = [CountingCommunicator(group.communicator(rank)) for rank in range(2)]

    def body(rank):
        for _ in range(3):
            counting[rank].all_reduce(torch.zeros(10))
        counting[rank].all_gather(torch.empty(6), torch.zeros(rank * 2 + 2), [2, 4])
        counting[rank].broadcast(torch.zeros(5), 1)
        counting[rank].barrier()

    run_threads(2, body)
    assert {name: (count.num_calls, count.num_bytes) for name, count in counting[1].counts.items()} == {
        "all_reduce": (3, 120),
        "all_gather": (1, 16),
        "broadcast": (1, 20),
        "barrier": (1, 0),
    }
    assert counting[0].counts["broadcast"].num_bytes == 0
    assert all(count.seconds > 0 for count in counting[0].counts.values())


def test_times_of_a_begun_exchange_are_counted_when_they_are_known():
    times = [None]
    begun = SimpleNamespace(wait=lambda: None, seconds=lambda: times[-1])
    counting = CountingCommunicator(SimpleNamespace(rank=0, size=1, begin_all_to_all=lambda *_: begun))
    counting.begin_all_to_all(torch.empty(3), torch.empty(3), [3], [3])  # never waited for
    transfer = counting.begin_all_to_all(torch.empty(3), torch.empty(3), [3], [3])
    transfer.wait()
    assert counting.stats()["all_to_all"] == CollectiveStats(num_calls=2, num_bytes=24, seconds=0.0, exposed_seconds=0.0)
    times.append((2.0, 0.5))
    for _ in range(2):
        found = counting.stats()["all_to_all"]
        assert (found.seconds, found.exposed_seconds) == (2.0, 0.5)


def test_collectives_of_a_graph_are_counted_when_it_is_launched_and_not_when_it_is_captured():
    inner = SimpleNamespace(rank=0, size=1, all_reduce=lambda *_: None, barrier=lambda: None)
    counting = CountingCommunicator(inner)
    launched = []

    def capture(step):
        step()  # a capturer that had to try twice
        step()
        return lambda: launched.append(1)

    def step():
        counting.all_reduce(torch.zeros(10))
        counting.barrier()

    replay = counting.captured(capture, step)
    assert counting.stats() == {}
    step()
    replay()
    replay()
    assert launched == [1, 1]
    assert {name: (each.num_calls, each.num_bytes) for name, each in counting.stats().items()} == {
        "all_reduce": (3, 120),
        "barrier": (3, 0),
    }
    before = counting.stats()["all_reduce"].seconds
    replay()
    assert counting.stats()["all_reduce"].seconds == before


@needs_native
def test_native_ordered_sum_of_rows_in_shared_memory():
    size, count = 3, 1000
    group = SharedGroup(size, rows=(size + 1) * count * 4)
    rows = group.memory.area("rows").view(np.float32).reshape(size + 1, count)
    parts = [values(rank, (count,), torch.float32).numpy() for rank in range(size)]
    address, native = group.memory.address("rows"), load_native()

    def body(rank):
        rows[rank] = parts[rank]
        barrier = group.barrier(rank)
        assert native.ordered_sum(barrier.address, rank, size, address, count, address + size * count * 4, count, "f32")

    run_threads(size, body)
    np.testing.assert_array_equal(rows[size], (parts[0] + parts[1]) + parts[2])
