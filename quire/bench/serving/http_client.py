"""A small HTTP/1.1 client on asyncio protocols: a connection pool, with bodies passed on in the callback that read them.

Nothing is awaited per chunk: a stream costs one callback per socket read, and one future at its end.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

from quire.base.errors import ConfigError
from quire.bench.serving.http_wire import HttpError, ResponseReader

Clock = Callable[[], float]


class BodySink(Protocol):
    """Receives the body of a successful event stream."""

    def on_body(self, data: bytes, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Response:
    """status, headers (names in lower case), the body (empty if a sink received it) and the time of its last byte."""

    status: int
    headers: dict[str, str]
    body: bytes
    end_s: float


@dataclass(frozen=True, slots=True)
class Target:
    """The server's address. path: prefix of all paths, without a trailing slash."""

    host: str
    port: int
    is_tls: bool = False
    path: str = ""

    @classmethod
    def parse(cls, url: str) -> Target:
        """Return the target of http://host:port/path or https://... Raises ConfigError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--base-url {url!r} is not a URL ({error}); give http://host:port") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
            raise ConfigError(f"--base-url must look like http://host:port or https://host:port/path, got {url!r}")
        is_tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, clock: Clock) -> None:
        self.is_open = False
        self.has_received = False
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._reader = ResponseReader()
        self._sink: BodySink | None = None
        self._done: asyncio.Future[Response] | None = None
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def exchange(self, request: bytes, sink: BodySink | None) -> asyncio.Future[Response]:
        """Send a request; the future gets the response at its end, or HttpError."""
        if self._transport is None or self._done is not None:
            raise HttpError("protocol", "the connection is not ready for a request")
        self._reader = ResponseReader()
        self._sink = sink
        self._body = []
        self.has_received = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        if self._done is None:
            self.close()  # unsolicited data: the connection is out of sync
            return
        self.has_received = True
        reader = self._reader
        try:
            body = reader.feed(data)
            if body:
                self._hand_out(body, now)
        except HttpError as error:
            self._fail(error)
            return
        if reader.is_complete:
            self._complete(now)

    def eof_received(self) -> bool:
        now = self._clock()
        if self._done is not None:
            try:
                self._reader.feed_eof()
            except HttpError as error:
                self._fail(error)
            else:
                self._complete(now)
        self.is_open = False
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._done is None:
            return
        if exc is None:
            self.eof_received()
        else:
            kind = "truncated" if self.has_received else "closed"
            self._fail(HttpError(kind, f"the connection broke: {type(exc).__name__}: {exc}"))

    def close(self) -> None:
        """Close the connection at once, discarding data in flight."""
        self.is_open = False
        self._done = None
        if self._transport is not None:
            self._transport.abort()

    def _hand_out(self, body: bytes, now: float) -> None:
        if self._sink is not None and self._reader.status == 200 and _is_event_stream(self._reader.headers):
            self._sink.on_body(body, now)
        else:
            self._body.append(body)

    def _complete(self, now: float) -> None:
        done, self._done = self._done, None
        reader = self._reader
        self.is_open = self.is_open and reader.keeps_alive
        if not self.is_open and self._transport is not None:
            self._transport.close()
        if done is not None and not done.done():
            done.set_result(Response(reader.status or 0, reader.headers, b"".join(self._body), now))

    def _fail(self, error: HttpError) -> None:
        done = self._done
        self.close()
        if done is not None and not done.done():
            done.set_exception(error)


def _is_event_stream(headers: dict[str, str]) -> bool:
    return headers.get("content-type", "").startswith("text/event-stream")


Connect = Callable[[Callable[[], Connection]], Awaitable[Connection]]
"""Opens a connection for a protocol factory; tests replace it."""


class HttpClient:
    """Sends requests to one server over kept connections, opening one when none is free.

    headers  lines sent with every request, in addition to Host and Content-Length
    clock    time stamps of received data, in seconds
    """

    def __init__(self, target: Target, headers: dict[str, str], clock: Clock, connect: Connect | None = None) -> None:
        self.target = target
        self.num_connections = 0
        self._clock = clock
        self._connect = connect or self._open
        self._ssl = ssl.create_default_context() if target.is_tls else None
        self._free: list[Connection] = []
        lines = {"Host": target.authority, **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode("latin-1")

    def encode(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the bytes of a request; a body is JSON."""
        start = f"{method} {self.target.path}{path} HTTP/1.1\r\n".encode("ascii")
        if method == "GET":
            return start + self._head + b"\r\n"
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode("ascii")
        return start + self._head + length + body

    async def exchange(self, request: bytes, sink: BodySink | None = None) -> Response:
        """Return the response to the bytes of a request. Raises HttpError.

        A kept connection that turns out to be closed is replaced once: the server had not seen the request.
        """
        connection = await self._take()
        is_reused = connection.has_received
        try:
            return await self._attempt(connection, request, sink)
        except HttpError as error:
            if not is_reused or error.kind != "closed" or connection.has_received:
                raise
        return await self._attempt(await self._new(), request, sink)

    async def _attempt(self, connection: Connection, request: bytes, sink: BodySink | None) -> Response:
        try:
            response = await connection.exchange(request, sink)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._free.append(connection)
        return response

    async def _take(self) -> Connection:
        while self._free:
            connection = self._free.pop()
            if connection.is_open:
                return connection
        return await self._new()

    async def _new(self) -> Connection:
        try:
            connection = await self._connect(lambda: Connection(self._clock))
        except OSError as error:  # ssl.SSLError is one
            where = f"{self.target.host}:{self.target.port}"
            raise HttpError("connect", f"cannot connect to {where}: {type(error).__name__}: {error}") from error
        self.num_connections += 1
        return connection

    async def _open(self, factory: Callable[[], Connection]) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(factory, self.target.host, self.target.port, ssl=self._ssl)
        return connection

    def close(self) -> None:
        """Close the connections that are not in use."""
        for connection in self._free:
            connection.close()
        self._free.clear()
