"""DirectBody: what an answer can do with its connection past ASGI: write pieces of its body, and be told when it closes."""

from __future__ import annotations

import time
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class DirectBody:
    """Writes pieces of a body whose start has gone out through ASGI, and whose end will; one for each request.

    A message that is awaited costs more than the write itself, and of a stream there are as many as tokens.

    last_write_s  of time.monotonic()
    on_lost       called when the connection closes before the answer is complete, where somebody works on it
    """

    __slots__ = ("_cycle", "_flow", "_transport", "last_write_s", "on_lost")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self.last_write_s = 0.0
        self.on_lost: Callable[[], object] | None = None

    def watch(self, on_lost: Callable[[], object]) -> bool:
        """Have a function called when the client goes, until `on_lost` is None again.

        False, with nothing done, where it has gone, or more of its request is to come, which somebody has to receive.
        """
        if self._cycle.disconnected or self._cycle.more_body:
            return False
        self._flow.resume_reading()  # what has come of the body may have stopped it, and a close is read, too
        self.on_lost = on_lost
        return True

    @property
    def is_open(self) -> bool:
        """Whether a piece can be written now: the body has begun, has no length, and the client reads what it gets."""
        cycle = self._cycle
        is_under_way = cycle.response_started and not cycle.response_complete and not cycle.disconnected
        return is_under_way and not self._flow.write_paused and cycle.chunked_encoding is True

    def write(self, piece: bytes) -> None:
        """Write a piece, which is not empty, as a chunk; only while it is open."""
        self.last_write_s = time.monotonic()
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
