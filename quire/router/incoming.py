"""Incoming: a client's request, and the way back to it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable

from starlette.types import Receive, Scope, Send

from quire.serving.body_room import BodyShare
from quire.serving.errors import ApiError, invalid

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_SENT_ON = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}


class ClientGoneError(Exception):
    """Nobody is there to answer."""


class Incoming:
    """One request. `status` is what was answered, 0 before; `has_ended` whether the whole answer was handed over."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, share: BodyShare) -> None:
        self._receive, self._send, self._share = receive, send, share
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        query: bytes = scope.get("query_string", b"")
        self.target: bytes = (scope.get("raw_path") or self.path.encode()) + (b"?" + query if query else b"")
        self.headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        self.status = 0
        self.has_ended = False

    def header(self, name: bytes) -> bytes:
        """Return a header's value; b"" where it is not there."""
        return next((value for key, value in self.headers if key == name), b"")

    def headers_to_send(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that a backend gets."""
        return [(name, value) for name, value in self.headers if name not in _NOT_SENT_ON]

    @property
    def key_digest(self) -> bytes:
        """Return what stands for the client's API key."""
        key = self.header(b"authorization") or self.header(b"x-api-key")
        return hashlib.blake2b(key, digest_size=8).digest()

    async def read_body(self, max_bytes: int) -> bytes:
        """Return the whole body. Raises ApiError where it is too large, ClientGoneError where it does not come."""
        stated = self.header(b"content-length")
        if stated.isdigit():
            if int(stated) > max_bytes:
                raise _too_large(max_bytes)
            self._share.check(int(stated))
        encoding = self.header(b"content-encoding").lower()
        if encoding not in (b"", b"identity"):
            raise invalid(f"content-encoding must be identity, got {encoding[:50].decode('latin-1')!r}", "content-encoding")
        found = bytearray()
        async for piece in self.body_pieces():
            if len(found) + len(piece) > max_bytes:
                raise _too_large(max_bytes)
            self._share.take(len(piece))
            found += piece
        return bytes(found)

    async def body_pieces(self) -> AsyncIterator[bytes]:
        """Return the body as it comes. Raises ClientGoneError."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            yield message.get("body", b"")
            if not message.get("more_body", False):
                return

    async def wait_gone(self) -> None:
        """Wait until the client has closed its connection, or has its answer; only after the whole body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send the head of an answer."""
        self.status = status
        kept = [(name, value) for name, value in headers if name not in _HOP_BY_HOP]
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    async def write(self, piece: bytes) -> None:
        """Send a piece of the body; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def finish(self, piece: bytes = b"") -> None:
        """Send the last piece."""
        self.has_ended = True
        await self._send({"type": "http.response.body", "body": piece, "more_body": False})

    async def answer(self, status: int, body: bytes, headers: Iterable[tuple[str, str]] = ()) -> None:
        """Send a whole answer of the router's own; JSON where no other content-type is given."""
        named = {"content-type": "application/json", **dict(headers), "content-length": str(len(body))}
        await self.start(status, [(name.encode(), value.encode()) for name, value in named.items()])
        await self.finish(body)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body may have {max_bytes} bytes", code="request_too_large")
