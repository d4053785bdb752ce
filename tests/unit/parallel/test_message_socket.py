"""Messages over TCP: the same as those of a ring, for the workers of one session only; who ends a connection is named."""

import socket
import threading

import numpy as np
import pytest

from quire.base.errors import WorkerError
from quire.kernels.native import load_native
from quire.parallel.barrier import AbortReason, GroupClosedError, ProcessBarrier
from quire.parallel.message_socket import (
    ConnectionMonitor,
    MessageListener,
    SocketReader,
    SocketWriter,
    connect_to_leader,
)
from quire.parallel.shared_memory import SharedMemoryFile
from tests.ranks import wait_until
from tests.unit.parallel.test_ring import check_message, random_arrays

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")

SESSION = bytes(range(16))


def own_barrier(rank, size=3):
    memory = SharedMemoryFile.create(ProcessBarrier.areas(size))
    ProcessBarrier.initialise(memory, size)
    return ProcessBarrier(memory, rank, size)


@pytest.fixture
def ends():
    """The writer of a leader and the readers of two workers, with their barriers and connections."""
    listener = MessageListener("127.0.0.1", SESSION)
    found = []
    thread = threading.Thread(target=lambda: found.append(listener.accept(3, 60)))
    thread.start()
    stranger = connect_to_leader("127.0.0.1", listener.port, b"x" * 16, 1, 30)
    workers = {rank: connect_to_leader("127.0.0.1", listener.port, SESSION, rank, 30) for rank in (1, 2)}
    thread.join()
    assert stranger.recv(1) == b""  # it was sent away
    barriers = {rank: own_barrier(rank) for rank in range(3)}
    writer = SocketWriter(found[0], SESSION, barriers[0])
    readers = {rank: SocketReader(workers[rank], SESSION, barriers[rank]) for rank in workers}
    yield writer, readers, barriers, found[0], workers
    for connection in (stranger, *found[0].values(), *workers.values()):
        connection.close()


def test_all_workers_receive_every_message_in_order(ends):
    writer, readers, *_ = ends
    sender = threading.Thread(target=lambda: [writer.send([seed, -seed], random_arrays(seed)) for seed in range(30)])
    sender.start()
    for seed in range(30):
        for reader in readers.values():
            check_message(reader.receive(), seed)
    sender.join()
    assert readers[1].receive(timeout_s=0.01) is None


def test_a_long_message_comes_whole(ends):
    writer, readers, *_ = ends
    values = np.arange(500_000)
    sender = threading.Thread(target=lambda: writer.send([7], [values]))
    sender.start()
    for reader in readers.values():
        np.testing.assert_array_equal(reader.receive().arrays[0], values)
    sender.join()


def test_a_closed_group_is_not_a_failure(ends):
    writer, readers, barriers, *_ = ends
    writer.close()
    with pytest.raises(GroupClosedError):
        readers[1].receive()
    assert barriers[1].abort_cause == (0, AbortReason.CLOSED)


def test_a_worker_that_ends_is_named_and_ends_the_others(ends):
    writer, readers, barriers, connections, workers = ends
    monitor = ConnectionMonitor(barriers[0], connections, lambda rank: (AbortReason.ENDED, f"rank {rank} of host b has ended"))
    monitor.start()
    workers[2].shutdown(socket.SHUT_RDWR)
    assert wait_until(lambda: barriers[0].abort_cause is not None)
    with pytest.raises(WorkerError, match="rank 2 of host b has ended"):
        writer.send([1])
    with pytest.raises(WorkerError, match="the connection to rank 0 has ended"):
        readers[1].receive()
    monitor.close()


def test_a_worker_that_does_not_come_is_named():
    listener = MessageListener("127.0.0.1", SESSION)
    with pytest.raises(WorkerError, match=f"rank 1, 2 has not connected to 127.0.0.1:{listener.port} in 0 s"):
        listener.accept(3, 0.05)
    listener.close()
    with pytest.raises(WorkerError, match=f"rank 1 cannot connect to rank 0 for messages at 127.0.0.1:{listener.port}"):
        connect_to_leader("127.0.0.1", listener.port, SESSION, 1, 1)
