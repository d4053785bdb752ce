"""Endpoint and Call: a route of the server and one request to it, independent of the web framework."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from quire.api.decode import LARGE_BYTES, BodyError, annotations_of, decode_body
from quire.base.errors import RequestError
from quire.serving.answers import Answer
from quire.serving.body_room import BodyShare
from quire.serving.config import ServerConfig
from quire.serving.errors import ApiError, ErrorStyle, from_quire_error, invalid, too_large, unknown_parameters
from quire.serving.interfaces import Tenant
from quire.serving.resume_wire import RESUME_HEADER, cut_output

D = TypeVar("D")
Body = TypeVar("Body", bound=msgspec.Struct)
HUGE_BYTES = 1 << 20  # decoding these holds the GIL for milliseconds, so only one is decoded at a time
MAX_TRACEPARENT_LENGTH = 128
MAX_TIMEOUT_S = 24 * 3600.0
_CLIENT_ID = re.compile(r"[A-Za-z0-9._~:/+=@,;|-]{1,128}")


def headers_of(scope: Scope) -> Mapping[str, str]:
    """Return the headers by their names in lower case; of repeated headers, the first."""
    found = scope.get("quire.headers")
    if found is None:
        found = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        scope["quire.headers"] = found
    return found


def client_id_of(headers: Mapping[str, str]) -> str | None:
    """Return the client's request id; None if it sends none, or one that is too long or has invalid characters.

    It is returned as x-request-id. The server's own id is in request-id and in the log, since ids of clients may repeat.
    """
    client_id = headers.get("x-request-id", "")
    return client_id if _CLIENT_ID.fullmatch(client_id) else None


@dataclass(slots=True)
class Call:
    """One request to an endpoint.

    share           of the BodyRoom, reserved as the body arrives
    ignored_params  paths of unknown fields of the body, and of formats in a schema that are not enforced; the
                    HTTP layer lists them in x-quire-ignored-params
    output          the tokens that came after the body, see quire.serving.resume_wire
    deployment      the model that the path names, as in Azure's URLs; it is the `model` of the body, whatever that says
    """

    request: Request
    owner: Tenant
    request_id: str
    config: ServerConfig
    share: BodyShare
    received_s: float = field(default_factory=time.monotonic)
    ignored_params: tuple[str, ...] = ()
    output: bytes = b""
    deployment: str | None = None

    @property
    def route(self) -> str:
        """The path pattern, for metrics."""
        return self.request.scope["quire.route"]

    @property
    def headers(self) -> Mapping[str, str]:
        """See headers_of."""
        return headers_of(self.request.scope)

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
        value = self.headers.get("traceparent")
        return value if value is not None and len(value) <= MAX_TRACEPARENT_LENGTH else None

    async def body(
        self,
        kind: type[Body],
        check_fields: Callable[[Mapping[str, msgspec.Raw]], None] | None = None,
        max_bytes: int | None = None,
        any_media_type: bool = False,
    ) -> Body:
        """Return the JSON body as a `kind`. Raises ApiError: 400, 408, 413, 415 or 503, naming the field.

        check_fields  may refuse the fields with a RequestError before they are decoded
        max_bytes     of the body, where that is less than of any
        any_media_type  take it as JSON whatever its content-type says
        """
        parts = await self.json_parts(max_bytes, any_media_type)
        stated = self.headers.get(RESUME_HEADER)
        if stated is not None:
            parts, self.output = cut_output(parts, stated)
        num_bytes = sum(map(len, parts))

        def decode() -> tuple[Body, tuple[str, ...]]:
            data = b"".join(parts)
            parts.clear()
            if self.deployment is not None:
                data = _with_model(data, self.deployment)
            return decode_body(data, kind, check_fields=check_fields)

        try:
            if num_bytes > HUGE_BYTES:
                async with self.share.decoding:
                    body, ignored = await asyncio.to_thread(decode)
            elif num_bytes > LARGE_BYTES:
                body, ignored = await asyncio.to_thread(decode)
            else:
                body, ignored = decode()
        except BodyError as error:
            raise invalid(str(error), error.param, error.code) from None
        except RequestError as error:
            raise from_quire_error(error) from None
        self.ignore(ignored)
        self.ignored_params += annotations_of(body)
        return body

    def ignore(self, names: tuple[str, ...]) -> None:
        """Record the paths of ignored fields. Raises ApiError 400 if the server is strict."""
        if names and self.config.strict:
            raise unknown_parameters(names)
        self.ignored_params += names

    @property
    def content_length(self) -> int | None:
        """The declared length of the body in bytes; None if it is missing or not a number."""
        stated = self.headers.get("content-length", "")
        return int(stated) if stated.isascii() and stated.isdigit() and len(stated) < 20 else None

    async def json_parts(self, max_bytes: int | None = None, any_media_type: bool = False) -> list[bytes]:
        """Return the bytes of a body that says it is JSON, with any_media_type of any, in the parts in which they came."""
        kind = self.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json" and not any_media_type:
            raise ApiError(415, f"content-type must be application/json, got {kind[:100]!r}", code="unsupported_media_type")
        limit = self.config.max_body_bytes
        return await self._parts(limit if max_bytes is None else min(max_bytes, limit))

    async def _parts(self, max_bytes: int) -> list[bytes]:
        """Return the whole body. Raises ApiError as soon as it is known to exceed max_bytes (413) or the BodyRoom (503)."""
        encoding = self.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise ApiError(415, f"content-encoding {encoding[:100]!r} is not supported", code="unsupported_media_type")
        length = self.content_length
        if length is not None:
            if length > max_bytes:
                raise too_large(max_bytes, length)
            self.share.check(length)
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async for part in self.request.stream():
                num_bytes += len(part)
                if num_bytes > max_bytes:
                    raise too_large(max_bytes, num_bytes)
                self.share.take(len(part))
                parts.append(part)
        except ClientDisconnect:
            parts.clear()  # the error's traceback may keep a reference
            raise ApiError(408, "the body did not arrive in full", code="request_timeout") from None
        except BaseException:
            parts.clear()
            raise
        return parts

    def deadline_s(self, is_streaming: bool) -> float:
        """Return the deadline of the answer in time.monotonic(): the client's, or the default."""
        headers = self.headers
        # The official clients send their timeout for a whole answer in a header.
        for name in ("x-request-timeout", *(() if is_streaming else ("x-stainless-read-timeout",))):
            stated = headers.get(name)
            if stated is not None:
                return self.received_s + _seconds(stated, name)
        return self.received_s + self.config.default_timeout_s


def _with_model(data: bytes, model: str) -> bytes:
    """Return a body with another model; one that is no JSON object as it is, for the decoder to refuse."""
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data
    return msgspec.json.encode({**fields, "model": model})


def _seconds(text: str, header: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise invalid(f"{header} must be a number of seconds above 0, up to {MAX_TIMEOUT_S:.0f}, got {text[:50]!r}", header)
    return seconds


def header(name: str, schema: Mapping[str, Any], description: str) -> Mapping[str, Any]:
    """Return the OpenAPI parameter of a header that may be sent."""
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": description}


def query(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the OpenAPI parameter of a query parameter that may be sent."""
    return {"name": name, "in": "query", "required": False, "schema": schema}


_TIMEOUT: Mapping[str, Any] = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S}
JOB_HEADERS = (
    header("x-request-timeout", _TIMEOUT, "Seconds until when the answer is wanted."),
    header("x-stainless-read-timeout", _TIMEOUT, "The same, as the official clients send it; a stream has none."),
    header("traceparent", {"type": "string", "maxLength": MAX_TRACEPARENT_LENGTH}, "W3C trace context."),
)

Handler = Callable[[D, Call], Awaitable[Answer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Generic[D]):
    """One route. Its handler gets a D, the parts of the server that it uses.

    path           with {parameters}; {name:path} also matches slashes
    body           the type of the JSON body, for the OpenAPI description
    answer         the type of the JSON answer, likewise; None if it is not JSON
    other_answers  types of JSON answers with other statuses (not errors); None for one without a body
    is_streaming   the answer may be server-sent events; without `answer` it always is a stream
    request_body   OpenAPI of a body that is not JSON
    query          OpenAPI parameters
    headers        likewise
    is_open        needs no API key
    error_style    the API whose shape its errors have
    success_media_type  of an answer that is neither JSON nor events
    """

    method: str
    path: str
    handler: Handler[D]
    summary: str
    tag: str
    body: type[msgspec.Struct] | None = None
    answer: Any = None
    other_answers: Mapping[int, type[msgspec.Struct] | None] = field(default_factory=dict[int, type[msgspec.Struct] | None])
    is_streaming: bool = False
    request_body: Mapping[str, Any] | None = None
    query: tuple[Mapping[str, Any], ...] = ()
    headers: tuple[Mapping[str, Any], ...] = ()
    is_open: bool = False
    error_style: ErrorStyle = "openai"
    success_media_type: str | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint with its handler bound to the parts of the server that it uses."""

    endpoint: Endpoint[Any]
    answer: Callable[[Call], Awaitable[Answer]]


def bind(endpoints: Iterable[Endpoint[D]], parts: D) -> tuple[Route, ...]:
    """Return the routes of endpoints that use the same parts of the server."""
    return tuple(Route(endpoint, partial(endpoint.handler, parts)) for endpoint in endpoints)
