"""DirectBody: direct access to a connection, bypassing ASGI: write pieces of a body, and be notified when it closes."""

from __future__ import annotations

import time
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class DirectBody:
    """Writes pieces of a body whose start and end are sent through ASGI. One object per request.

    An awaited ASGI message costs more than the write itself, and a stream has one per token.

    last_write_s  of time.monotonic()
    on_lost       called when the connection closes before the answer is complete
    """

    __slots__ = ("_cycle", "_flow", "_transport", "last_write_s", "on_lost")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self.last_write_s = 0.0
        self.on_lost: Callable[[], object] | None = None

    def watch(self, on_lost: Callable[[], object]) -> bool:
        """Set a function to call when the client disconnects, until `on_lost` is None again.

        Returns False, without effect, if the client has disconnected, or part of its request must still be received.
        """
        if self._cycle.disconnected or self._cycle.more_body:
            return False
        self._flow.resume_reading()  # reading may be paused by the body, and the close must be read
        self.on_lost = on_lost
        return True

    @property
    def is_open(self) -> bool:
        """Whether a piece can be written now: the body has begun, has no length, and the send buffer is not full."""
        cycle = self._cycle
        is_under_way = cycle.response_started and not cycle.response_complete and not cycle.disconnected
        return is_under_way and not self._flow.write_paused and cycle.chunked_encoding is True

    def write(self, piece: bytes) -> None:
        """Write a non-empty piece as a chunk. Call only while it is open."""
        self.last_write_s = time.monotonic()
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
