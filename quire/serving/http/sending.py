"""Sends an Answer: the work stops when the client disconnects, and an interrupted stream ends with an error event."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Send

from quire.serving.answers import Answer, Download, FrameSink, Ready, Stream, Unary
from quire.serving.errors import ApiError, as_api_error

COMMENT = b": keep-alive\n\n"
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
LINES_HEADERS = {**STREAM_HEADERS, "content-type": "application/x-ndjson"}
FRAMES_PER_TURN = 16  # then others get their turn


class Connection(FrameSink, Protocol):
    """A FrameSink that also reports a disconnect."""

    on_lost: Callable[[], object] | None

    def watch(self, on_lost: Callable[[], object]) -> bool:
        """Set a function to call when the client disconnects, until `on_lost` is None again; False if not possible."""
        ...


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete."""


def encode_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers in the format of ASGI."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]


async def send_ready(send: Send, answer: Ready) -> None:
    """Send a complete answer."""
    body = answer.body or b""
    headers = {"content-type": answer.media_type, **answer.headers, "content-length": str(len(body))}
    if answer.body is None:
        del headers["content-type"]
    await send({"type": "http.response.start", "status": answer.status, "headers": encode_headers(headers)})
    await send({"type": "http.response.body", "body": body})


def error_answer(error: ApiError, body: object) -> Ready:
    """Return an error as an answer; `body` makes its body in the format of the API."""
    return Ready(msgspec.json.encode(body), error.status, error.headers())


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends the answer to one request.

    send_frame          sends a piece of a body, bypassing the layers that handle only the start of an answer
    error_body          the format of errors before a stream has begun
    comment_interval_s  a stream without an event for this long gets a comment, so that proxies do not close it
    headers             are added to every answer
    request_id          of the request, for the log
    on_error            called with the error that is the answer, or ends it
    direct_body         the connection, if it supports direct writes
    is_head             a HEAD request: a streamed body is not begun
    """

    receive: Receive
    send: Send
    send_frame: Send
    error_body: Callable[[ApiError], object]
    comment_interval_s: float
    headers: Mapping[str, str]
    request_id: str
    on_error: Callable[[ApiError], None]
    direct_body: Connection | None = None
    is_head: bool = False

    async def send_answer(self, answer: Answer) -> None:
        """Send the answer. Raises ClientGoneError if the client disconnects first; the work has then been stopped."""
        if isinstance(answer, Ready):
            await self._send_ready(answer)
        elif isinstance(answer, Unary):
            await self._until_gone(self._run_unary(answer))
        elif self.is_head:
            await self._send_head(answer)
        elif isinstance(answer, Stream):
            await self._until_gone(self._run_stream(answer))
        else:
            await self._until_gone(self._run_download(answer))

    async def send_error(self, error: ApiError) -> None:
        """Send an error as the whole answer."""
        self.on_error(error)
        await self._send_ready(error_answer(error, self.error_body(error)))

    async def _send_ready(self, answer: Ready) -> None:
        await send_ready(self.send, Ready(answer.body, answer.status, {**self.headers, **answer.headers}, answer.media_type))

    async def _send_head(self, answer: Stream | Download) -> None:
        is_stream = isinstance(answer, Stream)
        if not is_stream:
            async for _ in answer.pieces:  # start the generator, so that aclose runs its cleanup
                break
        await _close(answer.frames if is_stream else answer.pieces)
        headers = STREAM_HEADERS if is_stream else {"content-type": answer.media_type}
        headers = encode_headers({**headers, **self.headers, **answer.headers})
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send({"type": "http.response.body", "body": b""})

    async def _until_gone(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` while watching the connection; when the connection closes, cancel the work and wait for it. Raises
        ClientGoneError."""
        connection, task = self.direct_body, asyncio.current_task()
        if connection is None or task is None:
            await self._until_received_gone(work)
            return
        num_cancellations, is_gone = task.cancelling(), False

        def stop() -> None:
            nonlocal is_gone
            is_gone = True
            task.cancel()

        if not connection.watch(stop):
            await self._until_received_gone(work)
            return
        try:
            await work
        except BaseException:
            if not is_gone:
                raise
        finally:
            connection.on_lost = None
        if not is_gone:
            return
        if task.uncancel() > num_cancellations:  # it was also cancelled from elsewhere
            raise asyncio.CancelledError
        raise ClientGoneError

    async def _until_received_gone(self, work: Coroutine[Any, Any, None]) -> None:
        """The same, when a disconnect is reported only by an ASGI message, for which a second task waits."""
        task = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(self._wait_for_disconnect())
        try:
            await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGoneError
        finally:
            watcher.cancel()
            if not task.done():
                task.cancel()
            # The cleanup of the work ends before the request counts as ended.
            await asyncio.wait({task, watcher})
        task.result()

    async def _wait_for_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            continue

    async def _run_unary(self, answer: Unary) -> None:
        try:
            ready = await answer.work()
        except Exception as error:  # noqa: BLE001 - every failure becomes an answer
            await self.send_error(as_api_error(error, self.request_id))
            return
        await self._send_ready(ready)

    async def _run_stream(self, answer: Stream) -> None:
        base, interval_s = (LINES_HEADERS, math.inf) if answer.is_lines else (STREAM_HEADERS, self.comment_interval_s)
        frames = _StreamWriter(self.send, self.send_frame, {**base, **self.headers, **answer.headers}, interval_s)
        if answer.direct_sink is not None and self.direct_body is not None:
            answer.direct_sink.sink = frames.sink = self.direct_body
        try:
            await frames.write_all(answer.frames)
        except Exception as error:  # noqa: BLE001 - every failure becomes an answer
            api_error = as_api_error(error, self.request_id)
            if not frames.has_started:
                await self.send_error(api_error)
                return
            self.on_error(api_error)
            await frames.write(answer.encode_error(api_error))
        finally:
            frames.stop_comments()
            await _close(answer.frames)
        await frames.end()

    async def _run_download(self, answer: Download) -> None:
        headers = {"content-type": answer.media_type, **self.headers, **answer.headers}
        await self.send({"type": "http.response.start", "status": 200, "headers": encode_headers(headers)})
        try:
            async for piece in answer.pieces:
                await self.send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            await _close(answer.pieces)
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})


async def _close(frames: AsyncIterator[bytes]) -> None:
    close = getattr(frames, "aclose", None)
    if close is not None:
        await close()


class _StreamWriter:
    """The body of one stream: the start with the first frame, comments in long silences.

    sink  where producers write frames directly
    """

    def __init__(self, send: Send, send_frame: Send, headers: Mapping[str, str], comment_interval_s: float) -> None:
        self.has_started = False
        self._send = send
        self._send_frame = send_frame
        self._headers = headers
        self._interval_s = comment_interval_s
        self._last_write_s = time.monotonic()
        self.sink: FrameSink | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    async def write_all(self, frames: AsyncIterator[bytes]) -> None:
        """Send every frame as it comes."""
        if math.isfinite(self._interval_s):
            self._schedule(self._interval_s)
        num_frames = 0
        async for frame in frames:
            await self.write(frame)
            num_frames += 1
            if num_frames % FRAMES_PER_TURN == 0:  # neither available frames nor a closed socket would yield
                await asyncio.sleep(0)
        if not self.has_started:
            await self._start()

    async def write(self, frame: bytes) -> None:
        """Send one frame, the headers before the first."""
        if not self.has_started:
            await self._start()
        self._last_write_s = time.monotonic()
        await self._send_frame({"type": "http.response.body", "body": frame, "more_body": True})

    async def end(self) -> None:
        """End the body."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def stop_comments(self) -> None:
        """Send no more comments."""
        if self._timer is not None:
            self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()

    async def _start(self) -> None:
        self.has_started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": encode_headers(self._headers)})

    def _schedule(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        last_write_s = self._last_write_s if self.sink is None else max(self._last_write_s, self.sink.last_write_s)
        silence_s = time.monotonic() - last_write_s
        if silence_s < self._interval_s:
            self._schedule(self._interval_s - silence_s)
            return
        # After the first comment the status is 200, and an error can only be an event.
        if self._comment is None or self._comment.done():
            self._comment = asyncio.ensure_future(self.write(COMMENT))
        self._schedule(self._interval_s)
