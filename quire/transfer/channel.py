"""Channel: messages with binary payloads on a socket between two engines.

A frame is a header of fixed size, a JSON object and a payload. Sizes are bounded before anything is allocated.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

PROTOCOL_VERSION = 2
_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"QKVT"
_MAX_FIELDS_BYTES = 4 << 20
_MAX_IOV = 512

Fields = dict[str, Any]
"""The fields of a message as they came over the wire; "type" names it."""


class TransferError(Exception):
    """The peer sent something that is not allowed, or went away."""


class Channel:
    """One connection. Every wait ends: after `silence_s` without a byte, or when another thread calls `shut_down`."""

    def __init__(self, sock: socket.socket, silence_s: float) -> None:
        self._sock = sock
        self._silence_s = silence_s
        self.num_received_bytes = 0

    def send(self, fields: Fields, payload: Sequence[memoryview] = (), timeout_s: float | None = None) -> None:
        """Send a message with the parts of its payload. Raises TransferError."""
        text = json.dumps(fields, separators=(",", ":")).encode()
        sizes = sum(part.nbytes for part in payload)
        parts = [memoryview(_HEADER.pack(_MAGIC, len(text), sizes) + text), *(part.cast("B") for part in payload)]
        deadline_s = time.monotonic() + (self._silence_s if timeout_s is None else timeout_s)
        try:
            while parts:
                self._sock.settimeout(max(0.001, deadline_s - time.monotonic()))
                num_sent = self._sock.sendmsg(parts[:_MAX_IOV])
                while parts and num_sent >= parts[0].nbytes:
                    num_sent -= parts.pop(0).nbytes
                if num_sent:
                    parts[0] = parts[0][num_sent:]
        except OSError as error:
            raise TransferError(f"sending failed: {error}") from error

    def receive(self, *types: str, timeout_s: float | None = None) -> tuple[Fields, int]:
        """Return the next message, which must be one of these types, and the size of its payload, which is to be read next.

        Raises TransferError.
        """
        header = self._read(_HEADER.size, self._silence_s if timeout_s is None else timeout_s)
        magic, num_fields, num_payload = _HEADER.unpack(header)
        if magic != _MAGIC or num_fields > _MAX_FIELDS_BYTES:
            raise TransferError("the peer does not speak the protocol of KV transfer")
        try:
            fields = json.loads(self._read(num_fields, self._silence_s))
        except ValueError:
            raise TransferError("the peer sent a message that is no JSON") from None
        if not isinstance(fields, dict):
            raise TransferError("the peer sent a message that is no JSON object")
        fields = cast("Fields", fields)
        if fields.get("type") not in types:
            raise TransferError(f"the peer sent {fields.get('type')!r:.40} where {' or '.join(types)} is expected")
        return fields, num_payload

    def receive_into(self, target: memoryview) -> None:
        """Read a part of a payload. Raises TransferError."""
        target, done = target.cast("B"), 0
        while done < target.nbytes:
            try:
                self._sock.settimeout(self._silence_s)
                num_bytes = self._sock.recv_into(target[done:])
            except OSError as error:
                raise TransferError(f"receiving failed: {error}") from error
            if num_bytes == 0:
                raise TransferError("the peer has closed the connection")
            done += num_bytes
            self.num_received_bytes += num_bytes

    def send_fd(self, fd: int) -> None:
        """Pass a file descriptor to the peer; on Unix sockets only. Raises TransferError."""
        try:
            self._sock.settimeout(self._silence_s)
            socket.send_fds(self._sock, [b"F"], [fd])
        except OSError as error:
            raise TransferError(f"sending failed: {error}") from error

    def receive_fd(self) -> int:
        """Return the file descriptor that the peer passes. Raises TransferError."""
        try:
            self._sock.settimeout(self._silence_s)
            data, fds, _, _ = socket.recv_fds(self._sock, 1, 1)
        except OSError as error:
            raise TransferError(f"receiving failed: {error}") from error
        if data != b"F" or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise TransferError("the peer has passed no file descriptor")
        os.set_inheritable(fds[0], False)
        return fds[0]

    @property
    def is_readable(self) -> bool:
        """Whether the peer has sent something that was not received yet, or has closed the connection."""
        poller = select.poll()
        poller.register(self._sock, select.POLLIN | select.POLLRDHUP)
        return bool(poller.poll(0))

    def _read(self, num_bytes: int, timeout_s: float) -> bytes:
        data = bytearray(num_bytes)
        if num_bytes:
            try:
                self._sock.settimeout(timeout_s)
                first = self._sock.recv_into(data)
            except OSError as error:
                raise TransferError(f"receiving failed: {error}") from error
            if first == 0:
                raise TransferError("the peer has closed the connection")
            self.receive_into(memoryview(data)[first:])
        return bytes(data)

    def shut_down(self) -> None:
        """End every wait of another thread on this connection, at once; that thread then closes it."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self.shut_down()
        self._sock.close()


def text_of(fields: Fields, name: str) -> str:
    """Return a string field. Raises TransferError."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise TransferError(f"field {name} of {fields.get('type')} must be a string, got {value!r:.100}")
    return value


def int_of(fields: Fields, name: str, low: int, high: int) -> int:
    """Return an integer field from low to high. Raises TransferError."""
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise TransferError(f"field {name} of {fields.get('type')} must be an integer from {low} to {high}, got {value!r:.100}")
    return value


def texts_of(fields: Fields, name: str) -> dict[str, str]:
    """Return a field that maps strings to strings. Raises TransferError."""
    value = fields.get(name)
    if isinstance(value, dict):
        texts = {key: text for key, text in cast("Fields", value).items() if isinstance(text, str)}
        if len(texts) == len(cast("Fields", value)):
            return texts
    raise TransferError(f"field {name} of {fields.get('type')} must map names to strings")


def list_of(fields: Fields, name: str) -> list[object]:
    """Return a field that is a list. Raises TransferError."""
    value = fields.get(name)
    if not isinstance(value, list):
        raise TransferError(f"field {name} of {fields.get('type')} must be a list, got {value!r:.100}")
    return cast("list[object]", value)
