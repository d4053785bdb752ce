"""GuardedProtocol: uvicorn's HTTP protocol with limits on the size and the slowness of requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import httptools
import msgspec
from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from quire.base.logging import get_logger
from quire.serving.config import MIB, ServerConfig
from quire.serving.errors import ApiError
from quire.serving.http.connection_limit import TOO_MANY, ConnectionLimit


class UnchunkedBody:
    """Stands in for the `send` of a cycle of uvicorn: a body without a length goes out as it is, and ends with the connection.

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


LINGER_S = 5.0
LINGER_BYTES = 32 << 20  # dropped as they come: they cost no memory
MAX_LINGERING = 256


class LingeringCloses:
    """How many connections of a server linger after their answer: what a client still sends is read and dropped for a while.

    A socket that is closed with unread bytes answers with a reset, which may overtake the answer, or end a client that writes
    all of its body before it reads. With more than `most` of them, connections are closed at once.
    """

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


logger = get_logger(__name__)

MAX_HEAD_BYTES = 32 << 10
MAX_HEADERS = 100
KEEP_ALIVE_S = 75  # longer than load balancers keep idle connections, so that the load balancer closes first
TOO_LARGE = ApiError(
    431, f"a request may have {MAX_HEADERS} headers of {MAX_HEAD_BYTES} bytes together", code="headers_too_large"
)


class GuardedProtocol(HttpToolsProtocol):
    """One connection. The parser itself has no limit on headers and no timeout for slow requests."""

    head_timeout_s = 10.0
    body_timeout_s = 30.0
    write_timeout_s = 30.0
    limit = ConnectionLimit(math.inf)
    on_refused: Callable[[ApiError], None] = staticmethod(lambda error: None)
    lingering = LingeringCloses()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0  # raw bytes, while the head is incomplete
        self._num_header_bytes = 0  # of the headers that were parsed
        self._num_body_bytes = 0  # received bytes of the current body
        self._has_length = False
        self._num_stated_mib = 0.0
        self._is_in_head = True
        self._is_refused = False
        self._num_dropped_bytes = 0  # bytes received after the answer
        self._is_lingering = False
        self._body: DirectBody | None = None  # of the current answer
        self._head_without_upgrade: bytes | None = None  # of a request with an upgrade, parsed again

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self.limit.has_room(len(self.connections)):
            self._refuse(TOO_MANY)
            return
        self._wait(self.head_timeout_s, "the request head did not arrive in time")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_write_timer()
        if self._is_lingering:
            self.lingering.end()
        super().connection_lost(exc)
        if self._body is not None and self._body.on_lost is not None:
            self._body.on_lost()
        self._body = None
        self._unset_keepalive_if_required()  # also after a reset: its timer references the connection

    def pause_writing(self) -> None:
        super().pause_writing()
        # Needed to end an answer that waits for the send buffer: its task does not notice a disconnect.
        self._write_timer = self.loop.call_later(self.write_timeout_s, self._cut)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _cut(self) -> None:
        self._write_timer = None
        logger.warning("a connection is closed: its answer has not been read for %g s", self.write_timeout_s)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._drop(data)
            return
        if self._is_in_head:
            self._num_head_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        # A body may have arrived together with the head: only bytes of an incomplete head count.
        if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(TOO_LARGE, lingers=True)
        elif self._timer is None and not self._is_refused:
            self._wait_for_rest()

    def _parse(self, data: bytes) -> None:
        """Feed the parser.

        The server ignores upgrades, as it supports none. The parser cannot ignore them: it treats the bytes after
        the head of such a request as another protocol. So the head is parsed again without its Upgrade header, and the
        following bytes are the body, by its length or its chunks.
        """
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._head_without_upgrade is None:  # CONNECT, which has been refused
                    return
                data = self._head_without_upgrade + data[upgrade.args[0] :]
                self._head_without_upgrade = None
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as the base class does
            except httptools.HttpParserError:
                if not self._is_refused:
                    self.send_400_response("")
                return
            else:
                return

    def _rebuild_head(self) -> bytes:
        """Return the current head as bytes, without Upgrade headers."""
        start = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        lines = [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return start + b"".join(lines) + b"\r\n"

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._num_header_bytes += len(name) + len(value)
        if self._is_head_too_large():
            raise ValueError("the head is too large")  # the parser then requests a 400 response

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            self._refuse(ApiError(405, "CONNECT is not allowed: this is no proxy", code="method_not_allowed"), lingers=True)
            return
        if self.parser.should_upgrade():
            self._head_without_upgrade = self._rebuild_head()
            self._num_header_bytes = 0
            return
        self._stop_waiting()
        self._is_in_head = False
        self._num_head_bytes = self._num_header_bytes = 0
        self._num_body_bytes = 0
        super().on_headers_complete()
        if self.cycle is not None:  # whose task has not begun yet
            self._body = DirectBody(self.cycle)
            self.scope["quire.body"] = self._body  # type: ignore[typeddict-unknown-key]
            self.cycle.transport = LingeringTransport(self.transport, self._close_after_answer)  # type: ignore[assignment]
            if self.parser.get_http_version() != "1.1":
                self.cycle.send = UnchunkedBody(self.cycle).send  # type: ignore[method-assign]
                self.cycle.waiting_for_100_continue = False
        length = next((value for name, value in self.headers if name == b"content-length"), None)
        self._has_length = length is not None
        self._num_stated_mib = int(length) / MIB if length is not None and length.isdigit() and len(length) < 20 else 0.0

    def on_body(self, body: bytes) -> None:
        # A body without a declared length gets one more second for each received MiB.
        before, self._num_body_bytes = self._num_body_bytes, self._num_body_bytes + len(body)
        if self._timer is not None and not self._has_length and self._num_body_bytes // MIB > before // MIB:
            more_s = self._num_body_bytes // MIB - before // MIB
            self._wait(self._timer.when() + more_s - self.loop.time(), "the request body did not arrive in time")
        if self.cycle is not None and self.cycle.response_complete:
            self._drop(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # only the head of this request was parsed, or it is a CONNECT
            return
        self._stop_waiting()
        self._is_in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(
            TOO_LARGE if self._is_head_too_large() else ApiError(400, "this is not a valid HTTP request", code="bad_request"),
            lingers=True,
        )

    def _is_head_too_large(self) -> bool:
        return self.headers is not None and (len(self.headers) > MAX_HEADERS or self._num_header_bytes > MAX_HEAD_BYTES)

    def _wait_for_rest(self) -> None:
        """Start the timeout for the rest of a request that did not arrive in one piece."""
        if not self._is_in_head:
            num_mib = self._num_stated_mib if self._has_length else self._num_body_bytes // MIB
            self._wait(self.body_timeout_s + num_mib, "the request body did not arrive in time")
        elif self._num_head_bytes > 0:
            self._wait(self.head_timeout_s, "the request head did not arrive in time")

    def _wait(self, seconds: float, message: str) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, self._time_out, message)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self, message: str) -> None:
        self._timer = None
        if self._is_in_head and self._num_head_bytes == 0:  # a connection that was opened and never used
            self.transport.close()
        else:
            self._refuse(ApiError(408, message, code="request_timeout"))

    def _refuse(self, error: ApiError, lingers: bool = False) -> None:
        """Send an error without the application, unless it has begun to answer, and close.

        lingers  whether to wait for a client that may still be sending; not for one that is too slow or over the limit
        """
        if self._is_refused:
            return
        self._is_refused = True
        self._stop_waiting()
        if not self.transport.is_closing() and self._may_answer():
            if self._is_in_head:  # otherwise the application has the request, notices its end, and reports it itself
                self.on_refused(error)
            body = msgspec.json.encode(error.openai_body())
            headers = "".join(f"{name}: {value}\r\n" for name, value in error.headers().items())
            self.transport.write(
                STATUS_LINE[error.status]
                + headers.encode()
                + b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
                + str(len(body)).encode()
                + b"\r\n\r\n"
                + body
            )
        if lingers:
            self._linger()
        else:
            self.transport.close()

    def _close_after_answer(self) -> None:
        """Close the connection after the answer; first receive the rest of the request."""
        if self.cycle is not None and self.cycle.more_body:
            self._linger()
        else:
            self.transport.close()

    def shutdown(self) -> None:
        if self._is_lingering:
            self.transport.close()
        else:
            super().shutdown()

    def _linger(self) -> None:
        """Close when the client has closed, or when the limits of bytes or time are reached."""
        if self.transport.is_closing() or self._is_lingering:
            return
        if not self.lingering.begin():
            self.transport.close()
            return
        self._is_lingering = self._is_refused = True
        self._stop_waiting()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)
        if self.transport.can_write_eof():  # not with TLS, where the lingering ends by its time
            self.transport.write_eof()  # after what was written
        self.flow.resume_reading()

    def _drop(self, data: bytes) -> None:
        self._num_dropped_bytes += len(data)
        if self._num_dropped_bytes > LINGER_BYTES:
            self.transport.close()

    def on_response_complete(self) -> None:
        if self._is_lingering:  # no further request is accepted
            self.server_state.total_requests += 1
        else:
            super().on_response_complete()

    def _may_answer(self) -> bool:
        """Whether no answer to the refused request has begun, and no earlier answer is still being sent."""
        if self.cycle is None:
            return True
        return self.cycle.response_complete if self._is_in_head else not self.cycle.response_started


def guarded_protocol(
    config: ServerConfig, on_refused: Callable[[ApiError], None] = lambda error: None
) -> Callable[..., GuardedProtocol]:
    """Return the protocol class with the timeouts of a configuration and the limit of this process.

    on_refused  called with the error for requests that the application never received
    """
    attributes = {
        "head_timeout_s": config.head_timeout_s,
        "body_timeout_s": config.body_timeout_s,
        "write_timeout_s": config.slow_reader_s,
        "limit": ConnectionLimit.of_open_files(),
        "lingering": LingeringCloses(),
        "on_refused": staticmethod(on_refused),
    }
    return type("ConfiguredProtocol", (GuardedProtocol,), attributes)
