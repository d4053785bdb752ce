"""TorchCommunicator: which calls of torch.distributed it makes, and what happens when a rank is late or gone.

That results are right is tested with the other communicators, over gloo.
"""

import logging
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed

from quire.base.errors import UnsupportedError, WorkerError
from quire.parallel import torch_communicator as module
from quire.parallel.communicator import CountingCommunicator
from quire.parallel.torch_communicator import ORDERED_BYTES, TorchCommunicator
from tests.ranks import run_threads, start_processes, statuses_of, wait_until


class FakeWork:
    def __init__(self, calls):
        self._calls = calls

    def wait(self):
        self._calls.append(("wait",))


class FakeGroup:
    """A process group that notes calls. What it gathers is this rank's part, size times."""

    def __init__(self, rank, size):
        self._rank, self._size, self.calls = rank, size, []

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    def _note(self, *call):
        self.calls.append(call)
        return FakeWork(self.calls)

    def barrier(self):
        return self._note("barrier")

    def _allgather_base(self, out, part):
        out.view(self._size, -1).copy_(part.expand(self._size, -1))
        return self._note("all_gather", part.dtype, part.numel())

    def allreduce(self, tensors):
        return self._note("all_reduce", tensors[0].dtype, tensors[0].numel())

    def alltoall_base(self, out, x, received, sent):
        out.zero_()
        return self._note("all_to_all", x.dtype, received, sent)

    def broadcast(self, x, source):
        return self._note("broadcast", x.dtype, source)

    def send(self, tensors, to, tag):
        return self._note("send", tensors[0].dtype, to, tag)

    def recv(self, tensors, source, tag):
        return self._note("recv", tensors[0].dtype, source, tag)


@pytest.fixture
def fake():
    group = FakeGroup(1, 3)
    communicator = TorchCommunicator(group, "cpu")
    yield group, communicator
    communicator.close()


def calls_of(group):
    return [call for call in group.calls if call != ("wait",)]


def test_every_operation_is_waited_for(fake):
    group, communicator = fake
    x = torch.ones(6)
    communicator.barrier()
    communicator.all_gather(torch.empty(18), x)
    communicator.all_reduce(x)
    communicator.reduce_scatter(torch.empty(2), x)
    communicator.all_to_all(torch.empty(6), x, [3, 2, 1], [1, 2, 3])
    communicator.broadcast(x, 2)
    communicator.send(x, 0)
    communicator.recv(x, 2)
    assert group.calls[1::2] == [("wait",)] * 8
    assert calls_of(group) == [
        ("barrier",),
        ("all_gather", torch.float32, 6),
        ("all_gather", torch.float32, 6),
        ("all_to_all", torch.float32, [2, 2, 2], [2, 2, 2]),
        ("all_to_all", torch.float32, [3, 2, 1], [1, 2, 3]),
        ("broadcast", torch.float32, 2),
        ("send", torch.float32, 0, 0),
        ("recv", torch.float32, 2, 0),
    ]


def test_the_exposed_time_of_an_exchange_is_that_in_which_its_caller_waits(monkeypatch):
    group, now, is_over = FakeGroup(1, 3), [0.0], threading.Event()

    def end(time_s):
        now[0] = time_s
        is_over.set()

    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    communicator = TorchCommunicator(group, "cpu", check=lambda: end(7.0))  # called while it waits
    group.alltoall_base = lambda *_: type("Work", (), {"wait": lambda self: is_over.wait()})()
    x = torch.ones(6)
    transfer = communicator.begin_all_to_all(torch.empty(6), x, [3, 2, 1], [1, 2, 3])
    now[0] = 5.0
    transfer.wait()
    assert transfer.seconds() == (7.0, 2.0)
    communicator.begin_all_to_all(torch.empty(6), x, [3, 2, 1], [1, 2, 3]).wait()
    communicator.close()


def test_float8_crosses_as_bytes(fake):
    group, communicator = fake
    x = torch.ones(6).to(torch.float8_e4m3fn)
    communicator.all_gather(x.new_empty(18), x)
    communicator.broadcast(x, 0)
    communicator.send(x, 0)
    communicator.recv(x, 0)
    communicator.all_to_all(torch.empty_like(x), x, [2, 2, 2], [2, 2, 2])
    assert {call[1] for call in calls_of(group)} == {torch.uint8}


def test_ordered_sum_of_a_large_tensor_is_gathered_in_pieces(fake):
    group, communicator = fake
    most = ORDERED_BYTES // 4
    x = torch.ones(2 * most + 5)
    communicator.all_reduce(x)
    assert calls_of(group) == [("all_gather", torch.float32, count) for count in (most, most, 5)]
    assert torch.equal(x, torch.full_like(x, 3.0))


def test_sum_in_any_order_is_the_librarys_only_where_it_is_large(fake):
    group, communicator = fake
    most = ORDERED_BYTES // 2
    communicator.all_reduce(torch.ones(most, dtype=torch.bfloat16), in_order=False)
    communicator.all_reduce(torch.ones(most + 1, dtype=torch.bfloat16), in_order=False)
    assert calls_of(group) == [("all_gather", torch.bfloat16, most), ("all_reduce", torch.bfloat16, most + 1)]


def test_uneven_parts_are_padded_to_the_largest_and_empty_ones_send_nothing(fake):
    group, communicator = fake
    communicator.all_gather(torch.empty(7, 2), torch.ones(2, 2), [4, 2, 1])
    communicator.all_gather(torch.empty(0, 2), torch.ones(0, 2), [0, 0, 0])
    communicator.all_reduce(torch.empty(0))
    communicator.broadcast(torch.empty(0), 0)
    communicator.send(torch.empty(0), 0)
    assert calls_of(group) == [("all_gather", torch.float32, 8)]


def test_tensors_that_are_not_contiguous_or_elsewhere_are_refused(fake):
    group, communicator = fake
    with pytest.raises(Exception, match="contiguous"):
        communicator.all_reduce(torch.ones(4, 4)[:, :2])
    with pytest.raises(Exception, match="on a device of type cpu, got meta"):
        communicator.broadcast(torch.ones(4, device="meta"), 0)
    assert group.calls == []


def test_error_that_something_else_knows_is_raised_instead():
    def check():
        raise WorkerError("rank 2 (pid 4711): killed by SIGKILL", 2)

    group = FakeGroup(0, 3)
    group.barrier = lambda: (_ for _ in ()).throw(RuntimeError("Connection closed by peer"))
    communicator = TorchCommunicator(group, "cpu", check=check)
    with pytest.raises(WorkerError, match="rank 2.*killed by SIGKILL"):
        communicator.barrier()
    communicator.close()


def test_wait_ends_when_something_else_knows_that_the_group_has_ended():
    known = threading.Event()

    def check():
        if known.is_set():
            raise WorkerError("rank 1 is stopped", 1)

    group, is_over = FakeGroup(0, 2), threading.Event()
    group.barrier = lambda: type("Work", (), {"wait": lambda self: is_over.wait()})()
    communicator = TorchCommunicator(group, "cpu", check=check)
    threading.Timer(0.2, known.set).start()
    with pytest.raises(WorkerError, match="rank 1 is stopped"):
        communicator.barrier()
    is_over.set()
    communicator.close()


def connect(store, rank, size):
    return TorchCommunicator.gloo(store, rank, size, timedelta(seconds=30), interface="lo")


@pytest.mark.slow
def test_late_rank_is_named_in_the_log(monkeypatch, caplog):
    monkeypatch.setattr(module, "_WARN_S", 0.5)
    store = distributed.HashStore()

    def body(rank):
        communicator = connect(store, rank, 2)
        communicator.barrier()
        assert rank == 0 or wait_until(lambda: "rank 0 has waited for rank 1 in barrier for " in caplog.text)
        communicator.barrier()
        communicator.close()

    with caplog.at_level(logging.WARNING, "quire"):
        run_threads(2, body)


def run_until_gone(path, rank, size):
    communicator = connect(distributed.FileStore(str(path), size), rank, size)
    x = torch.ones(1000)
    communicator.all_reduce(x)
    path.with_name(str(rank)).touch()
    try:
        while True:
            communicator.all_reduce(x)
    except WorkerError as error:
        return 10 + error.rank if f"rank {error.rank} is gone" in str(error) else 98


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_killed_rank_is_named_by_all_others(tmp_path, victim):
    pids = start_processes(3, lambda rank: run_until_gone(tmp_path / "store", rank, 3))
    assert wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(3)), 60)
    began_s = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    others = [pid for rank, pid in enumerate(pids) if rank != victim]
    assert statuses_of(others) == [10 + victim] * 2
    assert time.monotonic() - began_s < 20
    statuses_of([pids[victim]])


@pytest.mark.skipif(distributed.is_nccl_available(), reason="this torch has NCCL")
def test_torch_without_nccl_is_told():
    with pytest.raises(UnsupportedError, match="no NCCL"):
        TorchCommunicator.nccl(distributed.HashStore(), 0, 1)


@pytest.mark.skipif(not (torch.cuda.is_available() and distributed.is_nccl_available()), reason="no GPU with NCCL")
def test_nccl_of_one_rank():
    communicator = TorchCommunicator.nccl(distributed.HashStore(), 0, 1)
    x = torch.arange(6.0, device="cuda")
    out = torch.empty_like(x)
    communicator.all_gather(out, x)
    communicator.all_reduce(x)
    communicator.all_to_all(out, x, [6], [6])
    communicator.broadcast(x, 0)
    communicator.barrier()
    assert torch.equal(out.cpu(), torch.arange(6.0))
    assert torch.equal(x.cpu(), torch.arange(6.0))
    communicator.close()


class Never:
    """An event of a device that waits for a rank that is gone."""

    def query(self):
        return False


def test_waiting_for_the_device_ends_when_the_group_has():
    checks = []

    def check():
        checks.append(True)
        if len(checks) == 3:
            raise WorkerError("rank 1 is gone", 1)

    communicator = CountingCommunicator(TorchCommunicator(FakeGroup(0, 2), "cpu", check=check))
    with pytest.raises(WorkerError, match="rank 1 is gone"):
        communicator.wait_for(Never())
    communicator.close()
