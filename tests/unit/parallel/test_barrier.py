"""ProcessBarrier: who is missing, why a group has ended."""

import logging
import os
import signal
import threading
import time

import pytest

from quire.base.errors import WorkerError
from quire.contracts.parallel import MAX_RANKS
from quire.kernels.native import load_native
from quire.parallel import barrier as barrier_module
from quire.parallel.barrier import AbortReason, GroupClosedError, ProcessBarrier
from quire.parallel.shared_memory import SharedMemoryFile
from tests.ranks import SharedGroup, run_threads, wait_until

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")


def test_most_ranks_are_those_of_the_native_barrier():
    assert load_native().MAX_RANKS == MAX_RANKS


def test_all_ranks_pass():
    group = SharedGroup(3)
    barriers = [group.barrier(rank) for rank in range(3)]
    run_threads(3, lambda rank: [barriers[rank].wait() for _ in range(50)])
    assert [barrier.num_passed for barrier in barriers] == [50] * 3


def test_timeout_names_the_missing_rank_its_process_and_layer():
    group = SharedGroup(3)
    missing = group.barrier(1)
    missing.set_pid(4711)
    missing.set_location(3)
    load_native().arrive_at_barrier(group.barrier(2).address, 2)
    with pytest.raises(WorkerError, match=r"rank 1 \(pid 4711, layer 3\) has not reached the barrier for 0.1 s") as caught:
        group.barrier(0).wait(0.1)
    assert caught.value.rank == 1


def test_wait_ends_in_time_where_the_yields_before_its_sleep_take_longer(monkeypatch):
    """As on a machine that others use, where a yield takes milliseconds."""
    for name in ("NUM_YIELDS", "_FEW_YIELDS"):
        monkeypatch.setattr(barrier_module, name, 1 << 31)
    group = SharedGroup(2)
    late = threading.Timer(20.0, group.barrier(1).wait)
    late.start()
    with pytest.raises(WorkerError, match="rank 1 has not reached the barrier"):
        group.barrier(0).wait(0.02)
    late.cancel()


def test_slow_rank_is_named_in_the_log(monkeypatch, caplog):
    monkeypatch.setattr(barrier_module, "_WARN_S", 0.1)
    group = SharedGroup(2)

    def come_when_it_is_told():
        wait_until(lambda: "rank 0 has waited" in caplog.text)
        group.barrier(1).wait()

    late = threading.Thread(target=come_when_it_is_told)
    late.start()
    with caplog.at_level(logging.WARNING, "quire"):
        group.barrier(0).wait()
    late.join()
    assert "rank 0 has waited for rank 1 for" in caplog.text


@pytest.mark.parametrize(
    "reason, text, told",
    [
        (AbortReason.FAILED, "MemoryError: no memory for 3 GB", "no memory for 3 GB"),
        (AbortReason.ENDED, "", "rank 1 has ended"),
        (AbortReason.STALLED, "", "rank 1 has stopped answering"),
    ],
    ids=lambda value: str(value),
)
def test_error_of_the_others_says_why(reason, text, told):
    group = SharedGroup(2)
    group.barrier(1).abort(1, reason, text)
    with pytest.raises(WorkerError, match=told) as caught:
        group.barrier(0).wait()
    assert caught.value.rank == 1
    with pytest.raises(WorkerError, match=told):
        group.barrier(0).check()


def test_account_of_the_leader_is_preferred_where_a_rank_has_ended(monkeypatch):
    """The others see only that it has ended; its parent knows the signal, and may say so a little later."""
    monkeypatch.setattr(barrier_module, "_LEADER_ACCOUNT_S", 30.0)
    group = SharedGroup(4)
    group.barrier(2).abort(3, AbortReason.ENDED, "rank 3 (pid 5) has ended")
    leader = threading.Timer(0.1, lambda: group.barrier(0).write_account(3, "rank 3 (pid 5): killed by SIGKILL"))
    leader.start()
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        group.barrier(1).check()
    leader.join()


def test_account_of_the_leader_is_preferred_where_another_rank_was_first():
    group = SharedGroup(4)
    assert group.barrier(2).abort(3, AbortReason.ENDED, "rank 3 has ended")
    assert not group.barrier(0).abort(3, AbortReason.ENDED, "rank 3: killed by SIGKILL")
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        group.barrier(1).check()


def test_long_text_is_cut():
    group = SharedGroup(2)
    group.barrier(1).abort(1, AbortReason.FAILED, "é" * 5000)
    with pytest.raises(WorkerError, match="^éééé") as caught:
        group.barrier(0).check()
    assert 400 < len(str(caught.value)) < 1024


def test_closed_group_raises_an_error_of_its_own():
    group = SharedGroup(2)
    assert group.barrier(0).abort(0, AbortReason.CLOSED)
    assert not group.barrier(0).abort(1, AbortReason.FAILED, "too late")
    with pytest.raises(GroupClosedError):
        group.barrier(1).wait()


def test_group_of_some_ranks_speaks_of_ranks_of_the_world():
    memory = SharedMemoryFile.create(ProcessBarrier.areas(2, "stage"))
    ProcessBarrier.initialise(memory, 2, "stage")
    barrier = ProcessBarrier(memory, 0, 2, "stage", ranks=(4, 6))
    with pytest.raises(WorkerError, match="rank 6 has not reached") as caught:
        barrier.wait(0.05)
    assert caught.value.rank == 6
    barrier.abort(6, AbortReason.ENDED)
    with pytest.raises(WorkerError, match="rank 6 has ended"):
        barrier.check()


def test_communicator_reports_the_abort():
    group = SharedGroup(2)
    timer = threading.Timer(0.1, lambda: group.barrier(1).abort(1, AbortReason.FAILED, "rank 1: out of memory"))
    timer.start()
    with pytest.raises(WorkerError, match="out of memory"):
        group.communicator(0).barrier()
    timer.join()


def test_collective_can_be_interrupted():
    group = SharedGroup(2)
    timer = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))

    def wait():
        timer.start()
        group.communicator(0).barrier()

    with pytest.raises(KeyboardInterrupt):
        wait()
    timer.join()


@pytest.mark.slow
def test_slow_rank_in_a_collective_is_named_in_the_log(caplog):
    group = SharedGroup(3)
    run_threads(3, lambda rank: group.communicator(rank).barrier())

    def come_when_both_have_said_it():
        wait_until(lambda: len(caplog.records) == 2)
        group.communicator(2).barrier()

    late = threading.Thread(target=come_when_both_have_said_it)
    other = threading.Thread(target=group.communicator(1).barrier)
    with caplog.at_level(logging.WARNING, "quire"):
        late.start()
        other.start()
        group.communicator(0).barrier()
    late.join()
    other.join()
    assert "rank 0 has waited for rank 2 for 5 s" in caplog.text
    assert "rank 1 has waited for rank 2 for 5 s" in caplog.text


def test_pids_are_known_to_all():
    group = SharedGroup(2)
    assert group.barrier(0).pid(1) == 0
    group.barrier(1).set_pid(os.getpid())
    assert group.barrier(0).pid(1) == os.getpid()


def test_waits_and_their_seconds_are_counted_for_the_rank_that_waits():
    group = SharedGroup(2)

    def body(rank):
        barrier = group.barrier(rank)
        if rank == 1:
            assert wait_until(lambda: group.barrier(1).num_arrived(0) == 1)
            time.sleep(0.3)
        barrier.wait()

    run_threads(2, body)
    early, late = (group.barrier(0).counts(rank) for rank in (0, 1))
    assert (early.num_barriers, late.num_barriers) == (1, 1)
    assert (early.num_waits, late.num_waits) == (1, 0)  # the last one to come finds all there
    assert early.wait_s > 0.1
    assert late.wait_s == 0.0
    assert early.num_bytes == 0
