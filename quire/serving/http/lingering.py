"""Lingering closes: after the answer, the server reads and drops for a while what the client still sends.

Closing a socket with unread bytes sends a reset, which may destroy the answer before the client reads it, or fail a client
that writes its whole body before it reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LINGER_S = 5.0
LINGER_BYTES = 32 << 20  # dropped as they arrive, so they use no memory
MAX_LINGERING = 256


class LingeringCloses:
    """The number of lingering connections of a server; beyond the maximum, connections are closed at once."""

    def __init__(self, most: int = MAX_LINGERING) -> None:
        self.most = most
        self.count = 0

    def begin(self) -> bool:
        """Count one more; False if the maximum is reached."""
        if self.count >= self.most:
            return False
        self.count += 1
        return True

    def end(self) -> None:
        """Count one less."""
        self.count -= 1


class LingeringTransport:
    """The transport of a request cycle of uvicorn, whose `close` lingers."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close
