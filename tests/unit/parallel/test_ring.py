"""MessageRing: every message reaches every reader once, in order, also with slow readers."""

import threading
import time

import numpy as np
import pytest

from quire.base.errors import InvariantError, WorkerError
from quire.kernels.native import load_native
from quire.parallel.barrier import AbortReason
from quire.parallel.process_monitor import ProcessMonitor
from quire.parallel.ring import NUM_SLOTS, SLOT_BYTES, RingReader, RingWriter, message_bytes
from tests.ranks import SharedGroup, run_threads, start_processes, statuses_of

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")

DTYPES = ("int32", "int64", "uint8", "float32", "uint64", "uint32")


def random_arrays(seed):
    rng = np.random.default_rng(seed)
    counts = rng.choice([0, 1, 7, 64, 1000], rng.integers(0, 6))
    return [rng.integers(0, 200, count).astype(DTYPES[rng.integers(len(DTYPES))]) for count in counts]


def check_message(message, seed):
    assert message.header.tolist() == [seed, -seed, *[0] * 14]
    expected = random_arrays(seed)
    assert len(message.arrays) == len(expected)
    for got, wanted in zip(message.arrays, expected, strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("size", [2, 4])
def test_threads_receive_every_message_in_order(size):
    group, count = SharedGroup(size), 100

    def body(rank):
        if rank == 0:
            writer = RingWriter(group.memory, group.barrier(0))
            for seed in range(count):
                writer.send([seed, -seed], random_arrays(seed))
        else:
            reader = RingReader(group.memory, group.barrier(rank))
            for seed in range(count):
                check_message(reader.receive(), seed)

    run_threads(size, body)


def test_arrays_are_views_at_lines_of_the_shared_memory():
    group = SharedGroup(2)
    RingWriter(group.memory, group.barrier(0)).send([1], [np.arange(3), np.arange(5, dtype=np.int32)])
    message = RingReader(group.memory, group.barrier(1)).receive()
    start = group.memory.address("ring.slots")
    for array in message.arrays:
        address = array.__array_interface__["data"][0]
        assert address % 64 == 0
        assert start <= address < start + NUM_SLOTS * (SLOT_BYTES + 64)


@pytest.mark.parametrize("extra", [-1, 0, 1], ids=["less", "slot", "more"])
def test_messages_around_the_size_of_a_slot(extra):
    group = SharedGroup(2)
    array = np.arange((SLOT_BYTES - message_bytes([]) + 64 * extra) // 4, dtype=np.int32)
    reader = RingReader(group.memory, group.barrier(1))
    RingWriter(group.memory, group.barrier(0)).send([5], [array])
    np.testing.assert_array_equal(reader.receive().arrays[0], array)


def test_message_longer_than_the_whole_ring():
    group = SharedGroup(3)
    array = np.random.default_rng(1).integers(0, 1 << 60, 3 * NUM_SLOTS * SLOT_BYTES // 16)

    def body(rank):
        if rank == 0:
            writer = RingWriter(group.memory, group.barrier(0))
            writer.send([1], [array, np.arange(3)])
            writer.send([2])
        else:
            reader = RingReader(group.memory, group.barrier(rank))
            message = reader.receive()
            np.testing.assert_array_equal(message.arrays[0], array)
            assert message.arrays[1].tolist() == [0, 1, 2]
            assert reader.receive().header[0] == 2

    run_threads(3, body)


def read_slowly(group, rank, count, sleep_s):
    """Read with a sleep in the middle of each message; return how many were not as sent."""
    reader, wrong = RingReader(group.memory, group.barrier(rank)), 0
    for turn in range(count):
        message = reader.receive()
        before = message.arrays[0].copy()
        time.sleep(sleep_s)
        expected = np.full(50, turn)
        wrong += not (np.array_equal(before, expected) and np.array_equal(message.arrays[0], expected))
    return min(wrong, 90)


def test_slow_reader_loses_nothing_and_the_writer_waits():
    group, count, sleep_s = SharedGroup(3), 200, 0.003
    sleeps_s = [sleep_s, 0.0]
    pids = start_processes(2, lambda index: read_slowly(group, index + 1, count, sleeps_s[index]))
    writer = RingWriter(group.memory, group.barrier(0))
    began = time.monotonic()
    for turn in range(count):
        writer.send([turn], [np.full(50, turn)])
    assert time.monotonic() - began >= (count - NUM_SLOTS - 1) * sleep_s
    assert statuses_of(pids) == [0, 0]


def test_writer_waits_for_a_reader_that_holds_a_slot():
    group = SharedGroup(2)
    writer, reader = RingWriter(group.memory, group.barrier(0)), RingReader(group.memory, group.barrier(1))
    for turn in range(NUM_SLOTS):
        writer.send([turn])
    held = reader.receive()
    thread = threading.Thread(target=writer.send, args=([NUM_SLOTS],))
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    assert held.header[0] == 0
    reader.release()
    thread.join(5)
    assert [reader.receive().header[0] for _ in range(NUM_SLOTS)] == list(range(1, NUM_SLOTS + 1))


def test_receive_times_out_and_goes_on():
    group = SharedGroup(2)
    reader = RingReader(group.memory, group.barrier(1))
    assert reader.receive(0.02) is None
    RingWriter(group.memory, group.barrier(0)).send([3])
    assert reader.receive(0.02).header[0] == 3
    assert reader.receive(0) is None


def test_end_of_the_group_ends_the_wait_of_reader_and_writer():
    group = SharedGroup(3)
    writer = RingWriter(group.memory, group.barrier(0))
    timer = threading.Timer(0.1, lambda: group.barrier(2).abort(2, AbortReason.ENDED))
    timer.start()
    with pytest.raises(WorkerError, match="rank 2 has ended"):
        RingReader(group.memory, group.barrier(1)).receive()
    for _ in range(NUM_SLOTS):
        writer.send([0])
    with pytest.raises(WorkerError, match="rank 2 has ended"):
        writer.send([0])
    timer.join()


@pytest.mark.parametrize(
    "header, arrays, told",
    [
        (range(17), [], "at most 16 numbers"),
        ([], [np.zeros(1)] * 16, "15 arrays"),
        ([], [np.zeros(2, np.float64)], "float64"),
    ],
)
def test_what_no_message_can_hold_is_refused(header, arrays, told):
    group = SharedGroup(2)
    writer = RingWriter(group.memory, group.barrier(0))
    with pytest.raises(InvariantError, match=told):
        writer.send(header, arrays)
    writer.send([1])
    assert RingReader(group.memory, group.barrier(1)).receive().header[0] == 1


def test_number_of_more_than_32_bits_is_refused_and_nothing_is_sent():
    group = SharedGroup(2)
    with pytest.raises(OverflowError):
        RingWriter(group.memory, group.barrier(0)).send([1 << 31])
    assert RingReader(group.memory, group.barrier(1)).receive(0) is None


def idle(group, rank, seconds):
    monitor = ProcessMonitor(group.barrier(rank))
    monitor.start()
    reader = RingReader(group.memory, group.barrier(rank))
    before = time.process_time()
    assert reader.receive(seconds) is None
    share = min(200, round((time.process_time() - before) / seconds * 1e4))  # hundredths of a percent
    group.barrier(rank).wait()  # whoever ends while others are watched would be taken for dead
    monitor.close()
    group.barrier(rank).wait()
    return share


@pytest.mark.slow
def test_idle_readers_take_no_processor_time():
    size, seconds = 4, 3
    group = SharedGroup(size)
    pids = start_processes(size - 1, lambda index: idle(group, index + 1, seconds))
    for _ in range(2):
        group.barrier(0).wait()
    shares = statuses_of(pids)
    assert all(share < 98 for share in shares), f"hundredths of a percent: {shares}"


def test_a_reader_yields_for_a_while_after_a_message_and_then_sleeps():
    group = SharedGroup(2, num_cores=8)
    writer, used_s = RingWriter(group.memory, group.barrier(0)), []

    def body(rank):
        if rank == 0:
            time.sleep(0.5)
            writer.send([1])
            return
        reader, began_s = RingReader(group.memory, group.barrier(1)), time.thread_time()
        assert reader.receive().header[0] == 1
        used_s.append(time.thread_time() - began_s)

    run_threads(2, body)
    assert used_s[0] < 0.1  # of 0.5 s: MESSAGE_YIELD_S of it at most was not slept
