"""EnginePort: the engine process's end of the socket."""

from __future__ import annotations

import select
import time
from typing import BinaryIO

import msgspec
import zmq

from quire.serving.engine_client.framing import MAX_FRAME_BYTES, FrameReader, FrameWriter, beat, is_readable
from quire.serving.engine_client.messages import Lost, Start, ToEngine

_MAX_QUEUED_FRAMES = 10_000
_FLUSH_MS = 1000
_PEER_CHECK_MS = 1000


class PeerGoneError(Exception):
    """The server's process has ended."""


class EnginePort:
    """Receives commands and sends outputs. Standard input, which only the server's process holds open, signals its end."""

    def __init__(self, start: Start, lifeline: BinaryIO) -> None:
        self._lifeline = lifeline
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED_FRAMES)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.LINGER, _FLUSH_MS)
        if start.server_key:
            beat(self.socket)
            self.socket.curve_serverkey = start.server_key
            self.socket.curve_publickey, self.socket.curve_secretkey = zmq.curve_keypair()
        self.socket.connect(start.address)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(lifeline.fileno(), zmq.POLLIN)
        self.writer = FrameWriter(start.session)
        self._reader: FrameReader[ToEngine] = FrameReader(start.session, ToEngine)
        self.last_empty_s = time.monotonic()

    @property
    def num_commands(self) -> int:
        """One more than the sequence number of the last command."""
        return self._reader.num_received

    def wake_on(self, fd: int) -> None:
        """End the waits of `receive` also when a file descriptor is readable."""
        self._poller.register(fd, zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """Return the received commands, waiting up to timeout_s for the first. Raises PeerGoneError.

        Missing commands are reported to the server at once.
        """
        if timeout_s > 0 and not is_readable(self.socket):
            self._poller.poll(round(timeout_s * 1000))
            self.check_peer()
        commands: list[ToEngine] = []
        while is_readable(self.socket):
            received = self._reader.read(self.socket.recv(zmq.NOBLOCK))
            if received.lost is not None:
                self.send(Lost(*received.lost))
            if received.message is not None:
                commands.append(received.message)
        self.last_empty_s = time.monotonic()
        return commands

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; block while the server has too many unread ones. Raises MessageError and PeerGoneError."""
        frame = self.writer.write(message)
        while True:
            try:
                self.socket.send(frame, zmq.NOBLOCK)
                return
            except zmq.Again:
                self.socket.poll(_PEER_CHECK_MS, zmq.POLLOUT)
                self.check_peer()

    def check_peer(self) -> None:
        """Raise PeerGoneError when the server's process has ended."""
        readable, _, _ = select.select([self._lifeline], [], [], 0)
        if readable and not self._lifeline.read(1):
            raise PeerGoneError("the server's process has ended")

    def close(self) -> None:
        """Close the socket, after all messages are sent or a second has passed."""
        self.socket.close()
        self._context.term()
