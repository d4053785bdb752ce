"""Frames: messages with a session and a sequence number, so that lost or foreign messages are detected.

A frame is 8 bytes of session, the sequence number as u64 (little-endian, from 0 in each direction), and msgpack.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from quire.base.errors import QuireError
from quire.base.logging import get_logger
from quire.serving.engine_client.messages import MAX_MESSAGE_BYTES

logger = get_logger(__name__)

HEADER = struct.Struct("<8sQ")
MAX_FRAME_BYTES = HEADER.size + MAX_MESSAGE_BYTES
SESSION_BYTES = 8
_HEARTBEAT_MS = 5_000
_HEARTBEAT_TIMEOUT_MS = 30_000

Message = TypeVar("Message")


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a socket has a frame to read."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def beat(socket: zmq.Socket[bytes]) -> None:
    """Make a socket notice that a connection over a network is dead, so that it can be made again."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)


class MessageError(QuireError):
    """A message is too large or cannot be encoded as msgpack. Nothing was sent, and the connection is intact."""


class FrameWriter:
    """Numbers and encodes the messages of one side."""

    def __init__(self, session: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._session = session
        self._max_bytes = max_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self.frame = bytearray(HEADER.size)
        """The last one that was written."""
        self.num_sent = 0

    def write(self, message: msgspec.Struct) -> bytearray:
        """Return the frame of a message, in a buffer that the next call overwrites. Raises MessageError."""
        try:
            self._encoder.encode_into(message, self.frame, HEADER.size)
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise MessageError(f"a {type(message).__name__} message cannot be encoded: {error}") from error
        num_bytes = len(self.frame) - HEADER.size
        if num_bytes > self._max_bytes:
            self.frame = bytearray(HEADER.size)
            raise MessageError(
                f"a {type(message).__name__} message takes {num_bytes} bytes, the link carries {self._max_bytes} at most"
            )
        HEADER.pack_into(self.frame, 0, self._session, self.num_sent)
        self.num_sent += 1
        return self.frame


@dataclass(frozen=True, slots=True)
class Received(Generic[Message]):
    """The content of a frame.

    message  None for a repeated or invalid frame
    lost     first and last sequence number of the missing messages, including the frame's own if it is
             invalid; None if nothing is missing
    """

    message: Message | None
    lost: tuple[int, int] | None = None


class FrameReader(Generic[Message]):
    """Decodes the messages of the other side; `messages` is the closed union of their types."""

    def __init__(self, session: bytes, messages: Any) -> None:
        self._session = session
        self._decoder = msgspec.msgpack.Decoder(messages)
        self.num_received = 0
        self.num_rejected = 0

    def read(self, frame: bytes) -> Received[Message]:
        """Return the message, and the missing numbers before it. Never raises for the content of a frame."""
        expected = self.num_received
        if len(frame) < HEADER.size or frame[:SESSION_BYTES] != self._session:
            self._reject("it is not of this session")
            return Received(None, (expected, expected))
        sequence = HEADER.unpack_from(frame)[1]
        if sequence < expected:
            self._reject(f"number {sequence} came before")
            return Received(None)
        self.num_received = sequence + 1
        try:
            message = self._decoder.decode(memoryview(frame)[HEADER.size :])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._reject(f"number {sequence} is not understood ({error})")
            return Received(None, (expected, sequence))
        return Received(message, None if sequence == expected else (expected, sequence - 1))

    def _reject(self, reason: str) -> None:
        self.num_rejected += 1
        logger.warning("a message between server and engine was dropped: %s", reason)
