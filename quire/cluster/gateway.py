"""Gateway: the ASGI application of the ingress replicas, which passes requests to the engines' replicas and answers back."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from urllib.parse import quote

import msgspec
from starlette.types import Receive, Scope, Send

from quire.base.logging import get_logger
from quire.cluster.config import RayServeConfig
from quire.cluster.messages import AnswerFailure, AnswerHead, ForwardedRequest
from quire.router.incoming import ClientGoneError, Incoming, end_with_error, send_error, watched
from quire.router.owners import collection_of, object_id_of
from quire.router.paths import is_passed_on
from quire.router.prompt import ParsedBody, parse_body
from quire.router.resumable import PATHS, ResumableStream
from quire.router.upstream import UpstreamError
from quire.serving.body_room import BodyRoom
from quire.serving.errors import ApiError

logger = get_logger("quire.access")

Items = AsyncGenerator[AnswerHead | bytes | AnswerFailure, None]
SendToReplica = Callable[[ForwardedRequest], Items]
"""Sends a request to a replica that Ray chooses; ends with ReplicaLostError where that replica is lost."""
_LISTS = ("/ready", "/api/tags", "/api/ps", "/api/version")
"""Passed on in addition to what a router passes on: any replica gives the same answer."""
_STORED = (
    "replicas of Ray Serve share no {}: send the whole conversation with each request, or use `quire router`, which remembers "
    "the server that has an object"
)


class ReplicaLostError(Exception):
    """A replica ended, or does not answer, before the end of its answer."""


class Gateway:
    """Nothing is kept of an answer but the piece at hand, and what a stream needs to go on at another replica."""

    def __init__(self, config: RayServeConfig, send: SendToReplica) -> None:
        self._config = config
        self._send = send
        self._bodies = BodyRoom(config.max_held_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        started_s = time.monotonic()
        with self._bodies.share() as share:
            incoming = Incoming(_without_root(scope), receive, send, share)
            try:
                await self._answer(incoming)
            except ClientGoneError:
                incoming.status = 499
            except Exception as error:
                if not await send_error(incoming, error):
                    raise  # the head has gone out: Ray closes the connection
            finally:
                took_ms = (time.monotonic() - started_s) * 1000
                logger.info("%s %r %d %.1f ms", incoming.method, incoming.path[:100], incoming.status or 500, took_ms)

    async def _answer(self, incoming: Incoming) -> None:
        path, method = incoming.path, incoming.method
        if path == "/health" and method == "GET":
            await incoming.answer(200, msgspec.json.encode({"status": "ok"}))
            return
        if not is_passed_on(path) and path not in _LISTS:
            raise ApiError(404, f"there is no {path[:200]!r} here", code="not_found")
        collection = collection_of(path)
        if collection is not None and (collection != "responses" or object_id_of(path) is not None or method != "POST"):
            raise _not_supported(_STORED.format(collection))
        if path.startswith("/v1/requests/"):
            raise _not_supported("which replica served a request is not known: `quire explain` needs `quire router`")
        if method in ("GET", "HEAD"):
            request = ForwardedRequest("GET", incoming.target, _headers(incoming))
            await watched(incoming, self._pass_on(incoming, request, None))
            return
        if method != "POST":
            raise ApiError(405, f"{method[:20]} is not allowed here", code="method_not_allowed")
        body = await incoming.read_body(self._config.max_body_bytes)
        request = self._request(incoming, body, parse_body(body))
        is_resumable = request.is_streaming and path in PATHS and self._config.max_retries > 0
        await watched(incoming, self._pass_on(incoming, request, ResumableStream() if is_resumable else None))

    def _request(self, incoming: Incoming, body: bytes, parsed: ParsedBody) -> ForwardedRequest:
        if incoming.path.startswith("/v1/responses"):
            _check_stateless(parsed)
        model = incoming.deployment or parsed.model
        if model is not None and model != parsed.model:
            body = parsed.with_model(model)
        prompt = parsed.prompt(self._config.prefix_chunk_bytes, (model or "").encode() + b"\0" + incoming.key_digest)
        is_streaming = parsed.is_streaming(incoming.path)
        return ForwardedRequest("POST", incoming.target, _headers(incoming), body, prompt, is_streaming)

    async def _pass_on(self, incoming: Incoming, request: ForwardedRequest, stream: ResumableStream | None) -> None:
        """Pass a request to a replica, and to others where that is lost before its answer, or in a stream that can go on."""
        for num_left in range(self._config.max_retries, -1, -1):
            try:
                await self._attempt(incoming, request, stream)
                return
            except ReplicaLostError as error:
                is_begun = incoming.status != 0
                logger.warning("a replica was lost %s its answer: %s", "in" if is_begun else "before", error)
                goes_on = stream is not None and stream.has_started
                if is_begun and not goes_on:
                    raise
                if stream is not None:
                    stream.drop_kept()
                if num_left == 0 and is_begun:
                    await end_with_error(incoming, "the replica failed in the middle of its answer")
                elif num_left == 0:
                    raise _unavailable() from None

    async def _attempt(self, incoming: Incoming, request: ForwardedRequest, stream: ResumableStream | None) -> None:
        """Raises ReplicaLostError where the answer is not whole."""
        if stream is not None:
            request = replace(request, headers=list(stream.headers(request.headers)), body=stream.body(request.body))
        answer = _Answer(incoming, stream)
        async with aclosing(self._send(request)) as items:
            async for item in items:
                if isinstance(item, AnswerHead):
                    await answer.begin(item)
                elif isinstance(item, AnswerFailure):
                    await answer.fail(item)
                else:
                    await answer.write(item)
        await answer.end()


class _Answer:
    """The answer of one replica on its way to the client."""

    def __init__(self, incoming: Incoming, stream: ResumableStream | None) -> None:
        self._incoming = incoming
        self._stream = stream
        self._head: AnswerHead | None = None
        self._last = b""

    async def begin(self, head: AnswerHead) -> None:
        """Take in the head. Raises ReplicaLostError for a replica that cannot continue a stream."""
        self._head = head
        stream = self._stream
        if stream is None or not stream.is_marked(head.status, head.headers):
            if stream is not None and stream.has_started:
                raise ReplicaLostError(f"replica {head.replica} cannot continue a stream: status {head.status}")
            self._stream = None
            await self._incoming.start(head.status, head.headers)
        elif not stream.has_started:
            stream.has_started = True
            await self._incoming.start(head.status, stream.shown_headers(head.headers))

    async def write(self, piece: bytes) -> None:
        """Take in a piece of the body. Raises ReplicaLostError."""
        if self._stream is None:
            self._last = piece
            await self._incoming.write(piece)
            return
        try:
            found = self._stream.feed(piece)
        except UpstreamError as error:
            raise ReplicaLostError(str(error)) from None
        if found:
            await self._incoming.write(found)

    async def fail(self, failure: AnswerFailure) -> None:
        """End an answer that broke off. Raises ApiError 504, or ReplicaLostError."""
        if failure.is_timeout and self._head is None:
            raise ApiError(504, "the engine did not answer in time", code="backend_timeout")
        raise ReplicaLostError(failure.message)

    async def end(self) -> None:
        """Send the end. Raises ReplicaLostError where the engine was lost before it."""
        if self._head is None:
            raise ReplicaLostError("no answer came")
        if self._stream is not None and self._stream.is_engine_lost:
            raise ReplicaLostError("a stream ended early, or with an error of the engine")
        await self._incoming.finish(b"" if self._stream is None else self._stream.rest())


def _without_root(scope: Scope) -> Scope:
    """Return a scope whose paths begin after the application's route prefix."""
    root = scope.get("root_path", "").rstrip("/")
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    return {**scope, "path": scope["path"].removeprefix(root) or "/", "raw_path": raw.removeprefix(root.encode()) or b"/"}


def _headers(incoming: Incoming) -> list[tuple[bytes, bytes]]:
    """Return the headers for the engine's server, with the Origin, which it checks: there are no pages here."""
    origin = incoming.header(b"origin")
    sent = [(name, value) for name, value in incoming.headers_to_send() if name != b"origin"]
    return [*sent, (b"origin", origin)] if origin else sent


def _check_stateless(parsed: ParsedBody) -> None:
    for name in ("previous_response_id", "conversation"):
        if bytes(parsed.fields.get(name, msgspec.Raw(b"null"))) != b"null":
            raise _not_supported(_STORED.format("responses"), name)
    if bytes(parsed.fields.get("background", msgspec.Raw(b"false"))) == b"true":
        raise _not_supported("background: " + _STORED.format("responses"), "background")


def _not_supported(message: str, param: str | None = None) -> ApiError:
    return ApiError(501, message, code="not_supported", param=param)


def _unavailable() -> ApiError:
    return ApiError(503, "no replica could answer; try again", code="no_backend_available", retry_after_s=2.0)
