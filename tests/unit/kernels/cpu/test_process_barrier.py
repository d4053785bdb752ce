"""The native barrier between ranks: as threads of one process and as processes, over memory that all map."""

import ctypes
import mmap
import os
import signal
import threading
import time

import numpy as np
import pytest

from quire.kernels.native import load_native
from tests.ranks import run_threads, start_processes, statuses_of, wait_until

native = load_native()
pytestmark = pytest.mark.skipif(native is None, reason="the native kernels are not built")

DONE, ABORTED, TIMED_OUT = 0, 1, 2
ENDED, FAILED = 1, 2


class Shared:
    """Memory shared with children: a barrier's state and 4 KB of numbers after it."""

    def __init__(self, size, spins=200, yields=50):
        self.size = size
        self.map = mmap.mmap(-1, native.BARRIER_STATE_BYTES + 8192)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.state = (start + 127) // 128 * 128
        offset = self.state - start + native.BARRIER_STATE_BYTES
        self.numbers = np.frombuffer(self.map, np.int64, 512, offset)
        self.address = start + offset
        native.initialise_barrier(self.state, size, spins, yields)


def exchange(shared, rank, rounds):
    """Write a number, wait, check the numbers of all ranks, wait; return how many were wrong."""
    wrong = 0
    for turn in range(rounds):
        shared.numbers[rank] = turn * 100 + rank
        assert native.process_barrier_wait(shared.state, rank, shared.size)
        wrong += int(np.count_nonzero(shared.numbers[: shared.size] != turn * 100 + np.arange(shared.size)))
        assert native.process_barrier_wait(shared.state, rank, shared.size)
    return wrong


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_threads_see_what_all_wrote_before_the_barrier(size):
    shared, wrong = Shared(size), []
    run_threads(size, lambda rank: wrong.append(exchange(shared, rank, 200)))
    assert wrong == [0] * size
    assert [native.num_barriers(shared.state, rank) for rank in range(size)] == [400] * size


@pytest.mark.parametrize("spins, yields", [(2000, 200), (0, 0)], ids=["spinning", "sleeping"])
@pytest.mark.parametrize("size", [2, 4])
def test_processes_see_what_all_wrote_before_the_barrier(size, spins, yields):
    shared = Shared(size, spins, yields)
    assert statuses_of(start_processes(size, lambda rank: exchange(shared, rank, 300))) == [0] * size
    assert [native.num_barriers(shared.state, rank) for rank in range(size)] == [600] * size


def test_counters_may_wrap():
    shared = Shared(2)
    words = np.frombuffer(shared.map, np.uint32)
    offset = (shared.state - ctypes.addressof(ctypes.c_char.from_buffer(shared.map))) // 4
    for rank in range(2):
        words[offset + 32 + rank * 32] = 2**32 - 5
    assert [native.num_barriers(shared.state, rank) for rank in range(2)] == [2**32 - 5] * 2
    wrong = []
    run_threads(2, lambda rank: wrong.append(exchange(shared, rank, 10)))
    assert wrong == [0, 0]
    assert native.num_barriers(shared.state, 0) == 15


def test_wait_names_the_missing_rank_when_it_times_out():
    shared = Shared(3)
    for rank in (0, 2):
        native.arrive_at_barrier(shared.state, rank)
    assert native.wait_for_barrier(shared.state, 0, 3, 0.05) == TIMED_OUT
    assert native.find_missing_rank(shared.state, 0, 3) == 1
    native.arrive_at_barrier(shared.state, 1)
    assert native.wait_for_barrier(shared.state, 0, 3, 5.0) == DONE
    assert native.find_missing_rank(shared.state, 0, 3) == -1


def test_abort_ends_every_wait_and_keeps_the_first_reason():
    shared, results = Shared(3), []

    def wait(rank):
        results.append(native.process_barrier_wait(shared.state, rank, 3))

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)  # both sleep on the futex by now
    assert native.abort_group(shared.state, 1, ENDED)
    assert not native.abort_group(shared.state, 2, FAILED)
    for thread in threads:
        thread.join(20)
    assert results == [False, False]
    assert native.read_abort_word(shared.state) == ENDED << 16 | 2
    began = time.monotonic()
    assert native.process_barrier_wait(shared.state, 1, 3)  # all have come to this one
    assert not native.process_barrier_wait(shared.state, 1, 3)
    assert native.wait_for_counter(shared.state, 1, shared.address, 1, -1.0) == ABORTED
    assert time.monotonic() - began < 20


def test_sleeping_process_is_woken_by_abort_when_a_rank_was_killed():
    shared = Shared(2)

    def body(rank):
        if rank == 1:
            time.sleep(60)
        return int(native.process_barrier_wait(shared.state, rank, 2))

    pids = start_processes(2, body)
    time.sleep(0.1)
    os.kill(pids[1], signal.SIGKILL)
    native.abort_group(shared.state, 1, ENDED)
    assert statuses_of(pids) == [0, -signal.SIGKILL]


def test_heartbeat_rises_in_a_wait_and_stands_still_in_a_stopped_process():
    shared = Shared(2)
    (pid,) = start_processes(1, lambda _: int(native.process_barrier_wait(shared.state, 1, 2)))
    try:
        wait_until(lambda: native.heartbeat(shared.state, 1) >= 10)
        before = native.heartbeat(shared.state, 1)
        assert wait_until(lambda: native.heartbeat(shared.state, 1) > before)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)  # it has stopped
        before = native.heartbeat(shared.state, 1)
        time.sleep(0.2)
        assert native.heartbeat(shared.state, 1) == before
    finally:
        os.kill(pid, signal.SIGCONT)
        assert native.process_barrier_wait(shared.state, 0, 2)
        assert statuses_of([pid]) == [1]


def test_wait_in_the_main_thread_can_be_interrupted():
    shared = Shared(2)
    native.arrive_at_barrier(shared.state, 0)
    before = native.heartbeat(shared.state, 0)

    def interrupt():
        if wait_until(lambda: native.heartbeat(shared.state, 0) > before):
            signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        native.wait_for_barrier(shared.state, 0, 2, 90.0)
    thread.join()


def test_waiting_rank_sleeps():
    shared = Shared(2)
    native.arrive_at_barrier(shared.state, 0)
    before = time.thread_time()  # threads of other tests may still run
    assert native.wait_for_barrier(shared.state, 0, 2, 1.0) == TIMED_OUT
    assert time.thread_time() - before < 0.1


@pytest.mark.parametrize("rank, size, named", [(2, 2, "rank"), (-1, 2, "rank"), (0, 65, "size"), (0, 0, "size")])
def test_bad_rank_or_size_is_refused(rank, size, named):
    shared = Shared(2)
    with pytest.raises(ValueError, match=named):
        native.process_barrier_wait(shared.state, rank, size)
