"""Incoming: a client's request, and the way back to it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from starlette.types import Receive, Scope, Send

from quire.base.logging import get_logger
from quire.router.paths import error_style, plain_path
from quire.serving.body_room import BodyShare
from quire.serving.errors import ApiError, as_api_error, invalid, too_large

logger = get_logger("quire.access")

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
KEY_HEADERS = (b"authorization", b"x-api-key", b"api-key")
"""In which clients of OpenAI's, Anthropic's and Azure's APIs send their key."""
_NOT_SENT_ON = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-quire-resumable", b"x-quire-resume"}


class ClientGoneError(Exception):
    """Nobody is there to answer."""


class Incoming:
    """One request. `status` is what was answered, 0 before; `has_ended` whether the whole answer was handed over.

    path, target  of Azure's URLs those of the plain route; `deployment` is the model that such a URL names, else None
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, share: BodyShare) -> None:
        self._receive, self._send, self._share = receive, send, share
        self.method: str = scope["method"]
        self.path, self.deployment = plain_path(scope["path"])
        query: bytes = scope.get("query_string", b"")
        if self.deployment is None:
            self.target: bytes = (scope.get("raw_path") or quote(self.path).encode()) + (b"?" + query if query else b"")
        else:  # Azure's query has only the version of its API
            self.target = self.path.encode()
        self.headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        self.status = 0
        self.has_ended = False

    def header(self, name: bytes) -> bytes:
        """Return a header's value; b"" where it is not there."""
        return next((value for key, value in self.headers if key == name), b"")

    def headers_to_send(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that a backend gets, without an Origin that is the router itself: a backend would refuse it."""
        left_out = _NOT_SENT_ON | {b"origin"} if self._is_of_own_page() else _NOT_SENT_ON
        return [(name, value) for name, value in self.headers if name not in left_out]

    def _is_of_own_page(self) -> bool:
        """Whether a browser says that a page of this very host sends the request; `_check_host` has checked the host."""
        host, origin = self.header(b"host"), self.header(b"origin")
        return host != b"" and origin in (b"http://" + host, b"https://" + host)

    @property
    def key_digest(self) -> bytes:
        """Return what stands for the client's API key."""
        key = next(filter(None, map(self.header, KEY_HEADERS)), b"")
        return hashlib.blake2b(key, digest_size=8).digest()

    async def read_body(self, max_bytes: int) -> bytes:
        """Return the whole body. Raises ApiError where it is too large, ClientGoneError where it does not come."""
        stated = self.header(b"content-length")
        if stated.isdigit():
            if int(stated) > max_bytes:
                raise too_large(max_bytes, int(stated))
            self._share.check(int(stated))
        encoding = self.header(b"content-encoding").lower()
        if encoding not in (b"", b"identity"):
            raise invalid(f"content-encoding must be identity, got {encoding[:50].decode('latin-1')!r}", "content-encoding")
        found = bytearray()
        async for piece in self.body_pieces():
            if len(found) + len(piece) > max_bytes:
                raise too_large(max_bytes, len(found) + len(piece))
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


T = TypeVar("T")


async def watched(incoming: Incoming, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` while watching the client; cancel it when the client goes. Raises ClientGoneError."""
    running = asyncio.ensure_future(work)
    if incoming.method in ("GET", "HEAD"):
        async for _ in incoming.body_pieces():
            pass
    gone = asyncio.ensure_future(incoming.wait_gone())
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done() and not incoming.has_ended:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            raise ClientGoneError
        return await running
    finally:
        for task in (running, gone):
            task.cancel()
        await asyncio.gather(running, gone, return_exceptions=True)


async def send_error(incoming: Incoming, error: Exception) -> bool:
    """Answer with an error; return whether that was possible: after the head has gone out, only the close can tell."""
    if incoming.status:
        logger.error("an answer broke off", exc_info=error)
        return False
    api_error = as_api_error(error, incoming.header(b"x-request-id").decode("latin-1")[:128] or "-")
    body = api_error.body(error_style(incoming.path))
    headers = api_error.headers()
    if api_error.status == 413:  # the rest of the body is not read
        headers["connection"] = "close"
    await incoming.answer(api_error.status, msgspec.json.encode(body), headers.items())
    return True


async def end_with_error(incoming: Incoming, message: str) -> None:
    """End a stream of events with an event that tells the error."""
    failed = ApiError(502, message, code="backend_failed")
    is_anthropic = error_style(incoming.path) == "anthropic"
    await incoming.finish(failed.anthropic_event() if is_anthropic else failed.openai_event())
