"""The death, the stop and the hang of any rank, in any operation, as processes: all others get an error that names it."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.base.errors import WorkerError
from quire.kernels.native import load_native
from quire.parallel import barrier as barrier_module
from quire.parallel import process_monitor
from quire.parallel.barrier import AbortReason, GroupClosedError, ProcessBarrier
from quire.parallel.process_monitor import ProcessMonitor
from quire.parallel.ring import RingReader, RingWriter
from quire.parallel.shared_memory import SharedMemoryFile
from tests.ranks import SharedGroup, files_in_dev_shm, open_descriptors, start_processes, statuses_of, wait_until

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")

SIZE = 3
LIMIT_S = 25.0
"""Within which an end is noticed on a machine that others use, too; the watchdog's time is 30 s."""
NAMED = 10


@pytest.fixture(autouse=True)
def patient_ranks(monkeypatch):
    """A busy machine may keep the leader from telling the signal for a while."""
    monkeypatch.setattr(barrier_module, "_LEADER_ACCOUNT_S", 20.0)


def send_messages(group, rank):
    """Rank 0 sends through the ring, to readers that do not last."""
    if rank == 0:
        writer = RingWriter(group.memory, group.barrier(0))
        while True:
            writer.send([1], [np.arange(10)])
    reader = RingReader(group.memory, group.barrier(rank))
    while True:
        reader.receive()


def wait_for_messages(group, rank):
    """All readers wait for a message that never comes, and the writer for a reader that reads nothing."""
    if rank == 0:
        writer = RingWriter(group.memory, group.barrier(0))
        while True:
            writer.send([1])
    reader = RingReader(group.memory, group.barrier(rank))
    while rank == 2:
        reader.receive()
    group.barrier(1).wait_for_counter(group.memory.address("idle"), 1)


def call(body):
    def run(group, rank):
        communicator = group.communicator(rank)
        x = torch.ones(SIZE * 2000)
        while True:
            body(communicator, x)

    return run


def pass_on(communicator, x):
    to, source = (communicator.rank + 1) % SIZE, (communicator.rank - 1) % SIZE
    communicator.send(x[:10], to)
    communicator.recv(x[:10], source)


OPERATIONS = {
    "barrier": call(lambda c, x: c.barrier()),
    "all_gather": call(lambda c, x: c.all_gather(torch.empty(SIZE * 2000), x[:2000])),
    "all_reduce": call(lambda c, x: c.all_reduce(x)),
    "reduce_scatter": call(lambda c, x: c.reduce_scatter(torch.empty(2000), x)),
    "all_to_all": call(lambda c, x: c.all_to_all(torch.empty(6000), x, [2000] * SIZE, [2000] * SIZE)),
    "broadcast": call(lambda c, x: c.broadcast(x, 1)),
    "send_recv": call(pass_on),
    "ring": send_messages,
    "waiting": wait_for_messages,
}


def run_until_error(group, rank, operation):
    """Exit with NAMED + the rank that the error names, and leave the time of the error in shared memory."""
    times = group.memory.area("times").view(np.float64)
    monitor = ProcessMonitor(group.barrier(rank), watchdog_timeout_s=30.0)
    monitor.start()
    try:
        OPERATIONS[operation](group, rank)
    except WorkerError as error:
        times[rank] = time.monotonic()
        monitor.close()
        return NAMED + error.rank if f"rank {error.rank}" in str(error) else 98
    return 97


def end_and_check(operation, victim, signal_number):
    group = SharedGroup(SIZE, times=SIZE * 8, idle=64)
    pids = start_processes(SIZE, lambda rank: run_until_error(group, rank, operation))
    try:
        assert wait_until(lambda: all(group.barrier(rank).pid(rank) for rank in range(SIZE)))
        time.sleep(0.15)  # all are in the operation, and know each other's processes
        assert not any(files_in_dev_shm(pid) for pid in pids)
        began_s = time.monotonic()
        os.kill(pids[victim], signal_number)
        others = [rank for rank in range(SIZE) if rank != victim]
        assert statuses_of([pids[rank] for rank in others]) == [NAMED + victim] * 2
        times = group.memory.area("times").view(np.float64)
        assert max(times[rank] - began_s for rank in others) < LIMIT_S
    finally:
        os.kill(pids[victim], signal.SIGKILL)
        assert statuses_of([pids[victim]]) == [-signal.SIGKILL]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("operation, victim", [(name, index % SIZE) for index, name in enumerate(OPERATIONS)])
def test_killed_rank_is_named_by_all_others(operation, victim):
    end_and_check(operation, victim, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.covering
@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_killed_or_stopped_rank_is_named_in_every_operation(operation, number, victim):
    end_and_check(operation, victim, number)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("operation, victim", [("barrier", 0), ("waiting", 2)])
def test_stopped_rank_is_named_by_all_others(operation, victim):
    end_and_check(operation, victim, signal.SIGSTOP)


@pytest.fixture
def leader():
    """A group whose rank 0 is this process, and its monitor."""
    group = SharedGroup(SIZE)
    monitors = []

    def make(watchdog_timeout_s=30.0, others=()):
        monitors.append(ProcessMonitor(group.barrier(0), others, watchdog_timeout_s))
        return monitors[-1]

    yield group, make
    for monitor in monitors:
        monitor.close()


def worker(group, rank, body):
    monitor = ProcessMonitor(group.barrier(rank), watchdog_timeout_s=30.0)
    monitor.start()
    return body(rank)


@pytest.mark.parametrize("end, told", [("kill", "killed by SIGKILL"), ("exit", "exited with status 7")])
def test_parent_knows_the_signal_or_status(leader, end, told):
    group, make = leader

    def body(rank):
        time.sleep(0.1)
        if rank == 1:
            if end == "exit":
                os._exit(7)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(WorkerError, match=told):  # the account of the leader reaches the other worker, too
            group.barrier(2).wait()
        return 0

    pids = start_processes(2, lambda index: worker(group, index + 1, lambda rank: body(rank)))
    monitor = make()
    for rank, pid in enumerate(pids, start=1):
        monitor.watch(rank, pid)
    monitor.start()
    with pytest.raises(WorkerError, match=rf"rank 1 \(pid {pids[0]}\): {told}") as caught:
        group.barrier(0).wait()
    assert caught.value.rank == 1
    assert statuses_of(pids)[1] == 0


def test_process_that_ends_before_it_is_known_is_seen(leader):
    group, make = leader
    (pid,) = start_processes(1, lambda _: 3)
    monitor = make()
    monitor.watch(1, pid)
    monitor.start()
    with pytest.raises(WorkerError, match="rank 1: exited with status 3"):
        group.barrier(0).wait()
    statuses_of([pid])


def test_rank_that_hangs_while_others_wait_is_named_with_its_layer(leader):
    group, make = leader

    def body(rank):
        if rank == 1:
            group.barrier(1).set_location(3)
            time.sleep(30)  # its process lives and its monitor beats: only the barrier shows it
        else:
            with pytest.raises(WorkerError, match="rank 1"):
                group.barrier(2).wait()
        return 0

    pids = start_processes(2, lambda index: worker(group, index + 1, body))
    assert wait_until(lambda: "layer 3" in group.barrier(0).describe_rank(1))
    monitor = make(watchdog_timeout_s=0.5)
    monitor.watch_barriers()
    monitor.start()
    with pytest.raises(WorkerError, match=rf"rank 1 \(pid {pids[0]}, layer 3\) has kept the others waiting") as caught:
        group.barrier(0).wait()
    assert caught.value.rank == 1
    os.kill(pids[0], signal.SIGKILL)
    assert statuses_of(pids) == [-signal.SIGKILL, 0]


def test_slow_rank_that_shows_a_heartbeat_is_left_alone(leader, monkeypatch):
    """On a clock that goes on by 0.1 s with each heartbeat."""
    group, make = leader
    clock = SimpleNamespace(monotonic=lambda: 0.1 * min(12, group.barrier(0).heartbeat(1)))
    monkeypatch.setattr(process_monitor, "time", clock)

    def body(rank):
        for _ in range(12 if rank == 1 else 0):
            time.sleep(0.1)
            group.barrier(rank).beat()
        group.barrier(rank).wait()
        with pytest.raises(GroupClosedError):  # whoever ends before the group is closed is taken for dead
            group.barrier(rank).wait()
        return 0

    pids = start_processes(2, lambda index: worker(group, index + 1, body))
    monitor = make(watchdog_timeout_s=0.6)
    monitor.watch_barriers()
    monitor.start()
    group.barrier(0).wait()
    group.barrier(0).abort(0, AbortReason.CLOSED)
    assert statuses_of(pids) == [0, 0]


def test_end_of_workers_after_close_is_no_failure(leader):
    group, make = leader

    def body(rank):
        with pytest.raises(GroupClosedError):
            group.barrier(rank).wait()
        return 0

    pids = start_processes(2, lambda index: worker(group, index + 1, body))
    monitor = make()
    for rank, pid in enumerate(pids, start=1):
        monitor.watch(rank, pid)
    monitor.start()
    group.barrier(0).abort(0, AbortReason.CLOSED)
    assert statuses_of(pids) == [0, 0]
    time.sleep(0.2)
    with pytest.raises(GroupClosedError):
        group.barrier(0).check()


def test_other_groups_of_a_rank_end_too():
    group = SharedGroup(SIZE)
    memory = SharedMemoryFile.create(ProcessBarrier.areas(2, "stage"))
    ProcessBarrier.initialise(memory, 2, "stage")
    stage = ProcessBarrier(memory, 0, 2, "stage", ranks=(0, 2))
    called = threading.Event()
    (pid,) = start_processes(1, lambda _: time.sleep(30) or 0)
    monitor = ProcessMonitor(group.barrier(0), [stage], on_abort=called.set)
    monitor.watch(1, pid)
    monitor.start()
    timer = threading.Timer(0.1, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with pytest.raises(WorkerError, match="rank 1: killed by SIGKILL") as caught:
        stage.wait()
    assert caught.value.rank == 1
    assert called.wait(20)
    statuses_of([pid])
    monitor.close()
    timer.join()


def test_other_groups_hear_the_signal_where_another_rank_was_first(leader):
    group, make = leader
    stage = SharedGroup(SIZE).barrier(0)
    (pid,) = start_processes(1, lambda _: time.sleep(30) or 0)
    monitor = make(others=[stage])
    monitor.watch(1, pid)
    monitor.start()
    group.barrier(2).abort(1, AbortReason.ENDED, "rank 1 has ended")
    beat = group.barrier(0).process_beat(0)
    wait_until(lambda: group.barrier(0).process_beat(0) > beat + 2)  # the monitor has seen that, and not yet the end itself
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="rank 1: killed by SIGKILL"):
        stage.wait()
    statuses_of([pid])


def test_monitor_leaves_no_descriptors():
    group = SharedGroup(SIZE)
    before = open_descriptors()
    pids = start_processes(2, lambda _: time.sleep(30) or 0)
    monitor = ProcessMonitor(group.barrier(0))
    for rank, pid in enumerate(pids, start=1):
        monitor.watch(rank, pid)
    monitor.start()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    statuses_of(pids)
    with pytest.raises(WorkerError):
        group.barrier(0).wait()
    monitor.close()
    monitor.close()
    assert open_descriptors() <= before
