"""Messages between ranks of several hosts: the leader's connections to all workers, and the detection of their end."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import WorkerError
from quire.base.logging import get_logger
from quire.parallel.barrier import AbortReason, GroupClosedError, ProcessBarrier
from quire.parallel.ring import RingMessage, check_message, decode_message, encode_message, message_bytes

logger = get_logger(__name__)

SESSION_BYTES = 16
_HEAD = struct.Struct(f"<{SESSION_BYTES}sQ")  # the session, bytes that follow; 0: the leader closes the group
_HELLO = struct.Struct(f"<{SESSION_BYTES}sI")  # the session, the worker's rank
_TICK_S = 0.2
_HELLO_TIMEOUT_S = 5.0


class MessageListener:
    """Accepts the workers' connections to the leader. The port is bound before it is published."""

    def __init__(self, address: str, session: bytes) -> None:
        """Listen at one of this host's addresses. Raises WorkerError."""
        try:
            family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((address, 0), family=family)
        except OSError as error:
            raise WorkerError(f"rank 0 cannot listen for messages at {address}: {error}", 0) from error
        self._session = session
        self.address: str = address
        self.port: int = self._socket.getsockname()[1]

    def accept(self, size: int, timeout_s: float) -> dict[int, socket.socket]:
        """Return the connections of workers 1 to size - 1 by rank. Raises WorkerError after timeout_s."""
        found: dict[int, socket.socket] = {}
        end_s = time.monotonic() + timeout_s
        while len(found) < size - 1:
            self._socket.settimeout(max(0.01, end_s - time.monotonic()))
            try:
                connection, peer = self._socket.accept()
            except TimeoutError:
                missing = [rank for rank in range(1, size) if rank not in found]
                raise WorkerError(
                    f"rank {', '.join(map(str, missing))} has not connected to {self.address}:{self.port} in {timeout_s:.0f} s",
                    missing[0],
                ) from None
            rank = self._read_hello(connection)
            if rank is None or not 1 <= rank < size or rank in found:
                logger.warning("a connection from %s is not of a worker of this group and was closed", peer)
                connection.close()
            else:
                found[rank] = connection
        self.close()
        return found

    def _read_hello(self, connection: socket.socket) -> int | None:
        connection.settimeout(_HELLO_TIMEOUT_S)
        try:
            session, rank = _HELLO.unpack(receive_exactly(connection, _HELLO.size))
        except (OSError, EOFError):
            return None
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return rank if session == self._session else None

    def close(self) -> None:
        """Accept no more connections."""
        self._socket.close()


def connect_to_leader(address: str, port: int, session: bytes, rank: int, timeout_s: float) -> socket.socket:
    """Return a worker's connection. Raises WorkerError."""
    try:
        connection = socket.create_connection((address, port), timeout=timeout_s)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_HELLO.pack(session, rank))
    except OSError as error:
        raise WorkerError(f"rank {rank} cannot connect to rank 0 for messages at {address}:{port}: {error}", rank) from error
    return connection


class SocketWriter:
    """Sends every message to all workers; used by one thread."""

    def __init__(self, connections: dict[int, socket.socket], session: bytes, barrier: ProcessBarrier) -> None:
        self._connections = connections
        self._session = session
        self._barrier = barrier

    def send(self, header: Sequence[int], arrays: Sequence[NDArray[np.generic]] = ()) -> None:
        """See RingWriter.send. Raises WorkerError if the group has ended."""
        check_message(header, arrays)
        self._barrier.check()
        body = np.empty(message_bytes(arrays), np.uint8)
        encode_message(body, header, arrays)
        frame = _HEAD.pack(self._session, body.size) + body.tobytes()
        for rank, connection in self._connections.items():
            try:
                connection.sendall(frame)
            except OSError as error:
                self._barrier.check()  # the monitor knows more
                raise WorkerError(f"rank {rank} cannot be reached: {error}", rank) from error

    def close(self) -> None:
        """Send all workers that the group is closed."""
        for rank, connection in self._connections.items():
            try:
                connection.sendall(_HEAD.pack(self._session, 0))
            except OSError as error:
                logger.debug("rank %d had gone before the group was closed: %s", rank, error)


class SocketReader:
    """Receives the leader's messages; used by one thread."""

    def __init__(self, connection: socket.socket, session: bytes, barrier: ProcessBarrier) -> None:
        self._connection = connection
        self._session = session
        self._barrier = barrier

    def receive(self, timeout_s: float | None = None) -> RingMessage | None:
        """See RingReader.receive. Raises GroupClosedError if the leader has closed the group, WorkerError if it ended."""
        if timeout_s is not None and not select.select([self._connection], [], [], timeout_s)[0]:
            return None
        try:
            session, num_bytes = _HEAD.unpack(receive_exactly(self._connection, _HEAD.size))
            if session != self._session:
                raise WorkerError("a message of another group came from rank 0's address", 0)
            if num_bytes == 0:
                self._barrier.abort(0, AbortReason.CLOSED)
                raise GroupClosedError("the group of ranks has been closed", 0)
            body = receive_exactly(self._connection, num_bytes)
        except (OSError, EOFError) as error:
            self._barrier.check()
            raise WorkerError(f"the connection to rank 0 has ended: {error}", 0) from error
        return decode_message(np.frombuffer(body, np.uint8))


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytearray:
    """Return the next bytes of a connection. Raises EOFError if it ends before, and OSError."""
    whole = bytearray(num_bytes)
    view, at = memoryview(whole), 0
    while at < num_bytes:
        count = connection.recv_into(view[at:])
        if count == 0:
            raise EOFError(f"{at} of {num_bytes} bytes came")
        at += count
    return whole


class ConnectionMonitor:
    """A thread that ends the group of this process when a connection ends, and ends all connections with the group.

    describe  returns (reason, text) for the end of a rank

    Barriers that are given to watch_barriers end with the group, too.
    """

    def __init__(
        self,
        barrier: ProcessBarrier,
        connections: dict[int, socket.socket],
        describe: Callable[[int], tuple[AbortReason, str]],
    ) -> None:
        self._barrier = barrier
        self._connections = connections
        self._describe = describe
        self._others: tuple[ProcessBarrier, ...] = ()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-connection-monitor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._barrier.set_pid(os.getpid())
        self._thread.start()

    def watch_barriers(self, barriers: Iterable[ProcessBarrier]) -> None:
        """Abort these barriers, of some ranks on this host, when the group ends."""
        self._others = tuple(barriers)

    def close(self) -> None:
        """Stop the thread."""
        self._is_closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        poll = select.poll()
        ranks = {connection.fileno(): rank for rank, connection in self._connections.items()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLRDHUP)
        while not self._is_closed.is_set():
            for descriptor, _ in poll.poll(_TICK_S * 1000):
                poll.unregister(descriptor)
                if self._barrier.abort_cause is None and not self._is_closed.is_set():
                    self._end(ranks[descriptor])
            cause = self._barrier.abort_cause
            if cause is not None and cause[1] is not AbortReason.CLOSED:
                for other in self._others:
                    other.abort(*cause, str(self._barrier.abort_error()))
                self._hang_up()
                return

    def _end(self, rank: int) -> None:
        reason, text = self._describe(rank)
        # A leader that closes the group sends that first, but the reader may not have read it yet.
        time.sleep(0.0 if rank else _TICK_S)
        if self._barrier.abort(rank, reason, text):
            logger.error("rank %d ends the group: %s", self._barrier.rank, text)

    def _hang_up(self) -> None:
        """Close the connections, so that the other ranks notice."""
        for connection in self._connections.values():
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                logger.debug("a connection had ended before: %s", error)
