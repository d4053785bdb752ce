"""StageLinks: what a pipeline stage has written for the next one, over TCP, where stages share no memory.

The processes form a ring: each sends to the next stage, the last one to the leader. All of them have the areas of PipelineSizes
in memory of their own, at the same offsets, so a frame says where its bytes go, and which counter then rises.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
from collections.abc import Sequence

import numpy as np

from quire.base.errors import WorkerError
from quire.base.logging import get_logger
from quire.parallel.barrier import AbortReason, ProcessBarrier, native_extension
from quire.parallel.message_socket import MessageListener, connect_to_leader, receive_exactly
from quire.worker.pipeline_memory import PipelineMemory

logger = get_logger(__name__)

Block = tuple[int, int]
"""(address, number of bytes) in the areas of the pipeline."""

_HEAD = struct.Struct("<16sIQI")  # the session, number of blocks, offset of the counter, its new value
_BLOCK = struct.Struct("<QQ")  # offset, bytes
_CONNECT_S = 60.0


class StageLinks:
    """The connections of one process to its neighbours in the ring, and a thread that writes what comes to its memory.

    memory    of this process
    barrier   of this process: it gets the reason where a frame makes no sense
    listener  to which the previous process connects
    """

    def __init__(
        self,
        memory: PipelineMemory,
        barrier: ProcessBarrier,
        listener: MessageListener,
        next_address: tuple[str, int],
        session: bytes,
    ) -> None:
        """Connect to the listener of the next process, and wait for the previous one. Raises WorkerError."""
        self._memory, self._barrier, self._session = memory, barrier, session
        self._base, self._size = memory.span
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * self._size).from_address(self._base)).data
        self._native = native_extension()
        self._to = connect_to_leader(*next_address, session, 1, _CONNECT_S)
        self._from = listener.accept(2, _CONNECT_S)[1]
        self._is_closed = False
        self._thread = threading.Thread(target=self._receive, name="quire-stage-link", daemon=True)
        self._thread.start()

    def push(self, blocks: Sequence[Block], counter: int, value: int) -> None:
        """Send bytes of the areas to the next process, and then raise a counter there; addresses are those of this process.
        Raises WorkerError."""
        head = [_HEAD.pack(self._session, len(blocks), counter - self._base, value & 0xFFFFFFFF)]
        head += [_BLOCK.pack(address - self._base, num_bytes) for address, num_bytes in blocks]
        try:
            self._to.sendall(b"".join(head))
            for address, num_bytes in blocks:
                first = address - self._base
                self._to.sendall(self._bytes[first : first + num_bytes])
        except OSError as error:
            self._barrier.check()  # it knows more
            raise WorkerError(f"the next pipeline stage cannot be reached: {error}", self._barrier.rank) from error

    def _receive(self) -> None:
        try:
            while True:
                session, num_blocks, counter, value = _HEAD.unpack(receive_exactly(self._from, _HEAD.size))
                if session != self._session:
                    raise WorkerError("rows of another group came from the previous pipeline stage", self._barrier.rank)
                table = receive_exactly(self._from, num_blocks * _BLOCK.size)
                for first, num_bytes in _BLOCK.iter_unpack(table):
                    self._check_range(first, num_bytes)
                    at = first
                    while at < first + num_bytes:
                        count = self._from.recv_into(self._bytes[at : first + num_bytes])
                        if count == 0:
                            raise EOFError("the previous pipeline stage has ended in a frame")
                        at += count
                self._check_range(counter, 4)
                self._native.advance_counter(self._base + counter, value)
        except WorkerError as error:
            self._barrier.abort(self._barrier.rank, AbortReason.FAILED, str(error))
        except (OSError, EOFError) as error:
            # A process that ends is noticed by its connection to the leader, which says why.
            logger.debug("the connection to the previous pipeline stage has ended: %s", error)

    def _check_range(self, first: int, num_bytes: int) -> None:
        if first + num_bytes > self._size:
            raise WorkerError(f"bytes at {first} of {self._size} came from the previous pipeline stage", self._barrier.rank)

    def close(self) -> None:
        """Close the connections; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        for connection in (self._to, self._from):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                logger.debug("a connection had ended before: %s", error)
            connection.close()
        self._thread.join()


def own_address(leader_address: str) -> str:
    """Return the address of this host that reaches the leader's."""
    family = socket.getaddrinfo(leader_address, 1, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((leader_address, 1))  # sends nothing
        return str(probe.getsockname()[0])
