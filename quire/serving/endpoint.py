"""Endpoint and Call: a route of the server, and one request to it, apart from the web framework."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, Request

from quire.api.decode import LARGE_BYTES, decode_body
from quire.base.errors import RequestError
from quire.serving.answers import Answer
from quire.serving.config import ServerConfig
from quire.serving.errors import ApiError, invalid
from quire.serving.interfaces import Owner

if TYPE_CHECKING:
    from quire.serving.context import ServerContext

Body = TypeVar("Body", bound=msgspec.Struct)
MAX_TRACEPARENT_LENGTH = 128
MAX_TIMEOUT_S = 24 * 3600.0


@dataclass(slots=True)
class Call:
    """One request to an endpoint.

    ignored_params  fields of the body that mean nothing here; the shell lists them in x-quire-ignored-params
    """

    request: Request
    owner: Owner
    request_id: str
    config: ServerConfig
    received_s: float = field(default_factory=time.monotonic)
    ignored_params: tuple[str, ...] = ()

    @property
    def route(self) -> str:
        """The path pattern, for metrics."""
        return self.request.scope["quire.route"]

    @property
    def path_params(self) -> Mapping[str, Any]:
        """The parameters in the path."""
        return self.request.path_params

    @property
    def query(self) -> QueryParams:
        """The parameters in the query string."""
        return self.request.query_params

    @property
    def traceparent(self) -> str | None:
        """The W3C trace context that the client sent, as it sent it."""
        value = self.request.headers.get("traceparent")
        return value if value is not None and len(value) <= MAX_TRACEPARENT_LENGTH else None

    async def body(self, kind: type[Body]) -> Body:
        """Return the JSON body as a `kind`. Raises ApiError: 400, 408, 413 or 415, naming the field."""
        data = await self.raw_json()
        try:
            if len(data) > LARGE_BYTES:
                body, ignored = await asyncio.to_thread(decode_body, data, kind)
            else:
                body, ignored = decode_body(data, kind)
        except RequestError as error:
            raise invalid(str(error), error.param, getattr(error, "code", "invalid_value")) from None
        if ignored and self.config.strict:
            raise ApiError(400, f"unknown parameters: {', '.join(ignored)}", code="unknown_parameter", param=ignored[0])
        self.ignored_params = ignored
        return body

    async def raw_json(self) -> bytes:
        """Return the bytes of a body that says it is JSON."""
        kind = self.request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"content-type must be application/json, got {kind[:100]!r}", code="unsupported_media_type")
        return await self.raw_body(self.config.max_body_bytes)

    async def raw_body(self, max_bytes: int) -> bytes:
        """Return the whole body. Raises ApiError 413 as soon as it is known to be longer than max_bytes."""
        encoding = self.request.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise ApiError(415, f"content-encoding {encoding[:100]!r} is not supported", code="unsupported_media_type")
        length = self.request.headers.get("content-length", "")
        if length.isdigit() and len(length) < 20 and int(length) > max_bytes:
            raise too_large(max_bytes)
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async for part in self.request.stream():
                num_bytes += len(part)
                if num_bytes > max_bytes:
                    raise too_large(max_bytes)
                parts.append(part)
        except ClientDisconnect:
            raise ApiError(408, "the body did not arrive in full", code="request_timeout") from None
        return b"".join(parts)

    def deadline_s(self, is_streaming: bool) -> float:
        """Return until when the answer is wanted, in time.monotonic(): as the client says, or the default."""
        headers = self.request.headers
        stated = headers.get("x-request-timeout")
        if stated is None and not is_streaming:
            stated = headers.get("x-stainless-read-timeout")  # the official clients say how long they will wait
        return self.received_s + (self.config.default_timeout_s if stated is None else _seconds(stated))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise invalid(f"x-request-timeout must be a number of seconds up to {MAX_TIMEOUT_S:.0f}, got {text[:50]!r}")
    return seconds


def too_large(max_bytes: int) -> ApiError:
    """Return a 413; nothing more of the body is read."""
    return ApiError(413, f"the body may have {max_bytes} bytes", code="request_too_large")


Handler = Callable[["ServerContext", Call], Awaitable[Answer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One route.

    path           with {parameters}; {name:path} takes slashes too
    body           the type of the JSON body, for the OpenAPI description
    request_body   OpenAPI of a body that is not JSON
    query          OpenAPI parameters
    is_open        needs no API key
    is_anthropic   its errors have the shape of the Anthropic API
    """

    method: str
    path: str
    handler: Handler
    summary: str
    tag: str
    body: type[msgspec.Struct] | None = None
    request_body: Mapping[str, Any] | None = None
    query: tuple[Mapping[str, Any], ...] = ()
    is_open: bool = False
    is_anthropic: bool = False
    success_media_type: str = "application/json"
