"""Helpers for the processes that quire starts."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
from typing import BinaryIO

_PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct("<I")


def with_length(body: bytes) -> bytes:
    """Return a message for the standard input of a process, to be read by read_with_length."""
    return _LENGTH.pack(len(body)) + body


def read_with_length(stream: BinaryIO) -> bytes:
    """Return the body of a message of with_length. Raises EOFError if the stream ends before."""
    (num_bytes,) = _LENGTH.unpack(_read_exactly(stream, _LENGTH.size))
    return _read_exactly(stream, num_bytes)


def _read_exactly(stream: BinaryIO, num_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = stream.read(num_bytes - len(parts))
        if not part:
            raise EOFError(f"{len(parts)} of {num_bytes} bytes came")
        parts += part
    return bytes(parts)


def end_with_parent(parent_pid: int) -> bool:
    """Make the kernel kill this process when the thread that started it ends; return whether the parent is still alive.

    Has no effect on other systems than Linux, where the end must be detected otherwise, such as by the end of standard input.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent_pid
