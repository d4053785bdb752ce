"""UnchunkedBody: sends answers of unknown length to HTTP/1.0 clients, which do not support chunks."""

from __future__ import annotations

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class UnchunkedBody:
    """Replaces the `send` of a request cycle of uvicorn: a body without a length is sent unchunked and ends with the
    connection.

    uvicorn closes the connection after every answer to HTTP/1.0.
    """

    __slots__ = ("_cycle", "_send", "_until_close")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._until_close = False

    async def send(self, message: Message) -> None:
        """Send a message of ASGI."""
        cycle = self._cycle
        if message["type"] == "http.response.start":
            if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                self._until_close = True
                cycle.chunked_encoding = False
        elif self._until_close and cycle.scope["method"] != "HEAD":
            if cycle.flow.write_paused and not cycle.disconnected:
                await cycle.flow.drain()
            if not cycle.disconnected and (body := message.get("body", b"")):
                cycle.transport.write(body)
            if message.get("more_body", False):
                return
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)  # type: ignore[arg-type]
