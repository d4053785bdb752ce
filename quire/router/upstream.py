"""Upstream: HTTP/1.1 connections to one backend, kept and used again; bodies come as bytes, as fast as they are read."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

import httptools

from quire.router.config import BackendAddress

Headers = Sequence[tuple[bytes, bytes]]
READ_BYTES = 64 << 10
MAX_IDLE_CONNECTIONS = 64
"""Of one backend, kept for the next request."""
MAX_IDLE_S = 4.0
"""After which a kept connection is not used again: uvicorn, and so vLLM and SGLang, closes it after 5 s."""
_MAX_HEAD_BYTES = 128 << 10


class UpstreamError(Exception):
    """A backend that did not answer as it should. `is_refused`: no connection was made, so it never had the request."""

    def __init__(self, message: str, *, is_refused: bool = False, is_timeout: bool = False) -> None:
        super().__init__(message)
        self.is_refused = is_refused
        self.is_timeout = is_timeout


class _Connection:
    """One connection and the parser of its answers. Reading stops while nobody takes the bytes, so memory is bounded."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.kept_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: list[bytes] = []
        self.status = 0
        self.is_complete = False
        self.has_head = False
        self.keeps_alive = False
        self.num_bytes = 0

    def begin(self) -> None:
        """Get ready for the answer to the next request."""
        self._reset()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self.has_head = True
            self.keeps_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        if self.status < 200:  # an interim answer: the real one follows
            self.headers.clear()
        else:
            self.is_complete = True

    async def receive(self, timeout_s: float) -> None:
        """Take in what comes next: parts of the head, pieces of the body, or the end. Raises UpstreamError."""
        try:
            async with asyncio.timeout(timeout_s):
                data = await self.reader.read(READ_BYTES)
        except TimeoutError:
            raise UpstreamError(f"nothing came for {timeout_s:g} s", is_timeout=True) from None
        except OSError as error:
            raise UpstreamError(f"the connection broke: {error}") from None
        if not data:
            self._take_end()
            return
        self.num_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise UpstreamError(f"the answer is not valid HTTP: {error}") from None
        if not self.has_head and self.num_bytes > _MAX_HEAD_BYTES:
            raise UpstreamError(f"the head of the answer is longer than {_MAX_HEAD_BYTES} bytes")

    def _take_end(self) -> None:
        framed = (b"content-length", b"transfer-encoding")
        if self.has_head and not any(name in framed for name, _ in self.headers):
            self.is_complete, self.keeps_alive = True, False  # the close is what ends such a body
        else:
            raise UpstreamError("the connection was closed " + ("in the answer" if self.num_bytes else "without an answer"))

    def close(self) -> None:
        self.writer.transport.abort()


class UpstreamAnswer:
    """The answer of a backend, inside `async with`; leaving it early closes the connection, which cancels the request."""

    def __init__(self, owner: Upstream, connection: _Connection, idle_timeout_s: float) -> None:
        self._owner = owner
        self._connection = connection
        self._idle_timeout_s = idle_timeout_s

    @property
    def status(self) -> int:
        return self._connection.status

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers, names in lower case."""
        return self._connection.headers

    async def next_piece(self) -> bytes:
        """Return the next bytes of the body; b"" at its end. Raises UpstreamError."""
        connection = self._connection
        while not connection.pieces and not connection.is_complete:
            await connection.receive(self._idle_timeout_s)
        pieces, connection.pieces = connection.pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def read(self, max_bytes: int) -> bytes:
        """Return the whole body. Raises UpstreamError, also where it is longer than max_bytes."""
        found = bytearray()
        while piece := await self.next_piece():
            found += piece
            if len(found) > max_bytes:
                raise UpstreamError(f"the answer is longer than {max_bytes} bytes")
        return bytes(found)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        connection = self._connection
        if connection.is_complete and not connection.pieces and connection.keeps_alive:
            self._owner.keep(connection)
        else:
            connection.close()


class Upstream:
    """The connections to one backend."""

    def __init__(self, address: BackendAddress, connect_timeout_s: float) -> None:
        self.address = address
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[_Connection] = []
        self._is_closed = False
        self._tls = ssl.create_default_context() if address.is_tls else None

    async def send(
        self,
        method: str,
        target: bytes,
        headers: Headers,
        body: bytes | AsyncIterator[bytes] = b"",
        *,
        idle_timeout_s: float,
    ) -> UpstreamAnswer:
        """Send a request and return the answer when its head has come. Raises UpstreamError.

        headers  without Host and framing, which are added here; a body in pieces goes out chunked
        """
        connection = self._take_idle() or await self._connect()
        try:
            return await self._exchange(connection, _head(method, target, self.address, headers, body), body, idle_timeout_s)
        except BaseException:
            connection.close()
            raise

    def _take_idle(self) -> _Connection | None:
        """Return a kept connection that is still open; None where there is none."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof() and time.monotonic() - connection.kept_s < MAX_IDLE_S:
                return connection
            connection.close()
        return None

    async def _exchange(
        self, connection: _Connection, head: bytes, body: bytes | AsyncIterator[bytes], idle_timeout_s: float
    ) -> UpstreamAnswer:
        connection.begin()
        writing: asyncio.Task[None] | None = None
        try:
            if isinstance(body, bytes):
                connection.writer.write(head + body)
            else:
                connection.writer.write(head)
                writing = asyncio.create_task(_write_chunks(connection, body))
            while not connection.has_head:
                await connection.receive(idle_timeout_s)
        except UpstreamError:
            if writing is not None and writing.done() and not writing.cancelled() and writing.exception() is not None:
                raise writing.exception() from None  # the body did not come: not the backend's fault
            raise
        finally:
            if writing is not None:
                connection.keeps_alive = connection.keeps_alive and writing.done()
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
        return UpstreamAnswer(self, connection, idle_timeout_s)

    async def _connect(self) -> _Connection:
        address = self.address
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                if address.uds:
                    streams = await asyncio.open_unix_connection(address.uds, limit=READ_BYTES)
                else:
                    streams = await asyncio.open_connection(address.host, address.port, limit=READ_BYTES, ssl=self._tls)
        except TimeoutError:
            raise UpstreamError(f"no connection within {self._connect_timeout_s:g} s", is_refused=True) from None
        except OSError as error:
            raise UpstreamError(f"no connection: {error}", is_refused=True) from None
        return _Connection(*streams)

    def keep(self, connection: _Connection) -> None:
        """Take back a connection whose answer is complete."""
        if self._is_closed or len(self._idle) >= MAX_IDLE_CONNECTIONS or connection.reader.at_eof():
            connection.close()
        else:
            connection.kept_s = time.monotonic()
            self._idle.append(connection)

    def close_idle(self) -> None:
        """Close the kept connections; those in use go on."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def close(self) -> None:
        """Close the kept connections, and keep no more."""
        self._is_closed = True
        self.close_idle()


def _head(method: str, target: bytes, address: BackendAddress, headers: Headers, body: bytes | AsyncIterator[bytes]) -> bytes:
    lines = [method.encode() + b" " + target + b" HTTP/1.1", b"host: " + address.authority.encode()]
    lines += [name + b": " + value for name, value in headers]
    if not isinstance(body, bytes):
        lines.append(b"transfer-encoding: chunked")
    elif body or method not in ("GET", "HEAD"):
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def _write_chunks(connection: _Connection, body: AsyncIterator[bytes]) -> None:
    """Send a body as it comes. Where it does not come whole, close the connection, which ends the wait for the answer."""
    writer = connection.writer
    try:
        async for piece in body:
            if piece:
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
    except BaseException:
        connection.close()
        raise
