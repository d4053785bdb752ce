"""Lingering closes: what a client still sends is read and dropped for a while after its answer.

A socket that is closed with bytes in it that nobody read answers with a reset, which may overtake the answer, or end a client
that writes all of its body before it reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LINGER_S = 5.0
LINGER_BYTES = 32 << 20  # dropped as they come: they cost no memory
MAX_LINGERING = 256


class LingeringCloses:
    """How many connections of a server linger; beyond the most there may be they are closed at once."""

    def __init__(self, most: int = MAX_LINGERING) -> None:
        self.most = most
        self.count = 0

    def begin(self) -> bool:
        """Count one more; False where there is no room for it."""
        if self.count >= self.most:
            return False
        self.count += 1
        return True

    def end(self) -> None:
        """Count one less."""
        self.count -= 1


class LingeringTransport:
    """What a cycle of uvicorn does with its transport, which closes in another way."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close
