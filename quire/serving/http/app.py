"""The application: endpoints as routes, with request ids, authentication, errors, metrics and the access log."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import quire
from quire.base.logging import get_logger
from quire.serving.answers import Ready
from quire.serving.auth import Authenticator
from quire.serving.body_room import BodyRoom
from quire.serving.config import ServerConfig
from quire.serving.endpoint import Call, Endpoint, Route, client_id_of, headers_of
from quire.serving.errors import BODY_ROOM_CODE, ApiError, ErrorStyle, as_api_error
from quire.serving.http.sending import ClientGoneError, Sender, encode_headers, error_answer, send_ready
from quire.serving.ignored import IGNORED_HEADER, header_of
from quire.serving.interfaces import Gateway, Tenant
from quire.serving.metrics.server_metrics import ServerMetrics

access_logger = get_logger("quire.access")
PROBES = ("/health", "/ready", "/metrics")  # polled every few seconds by monitoring
EXPOSED_HEADERS = (
    *("x-request-id", "request-id", "x-client-request-id", "retry-after", "retry-after-ms", "x-should-retry", IGNORED_HEADER),
    *(f"x-ratelimit-{word}-{unit}" for word in ("limit", "remaining", "reset") for unit in ("requests", "tokens")),
)
CLIENT_GONE = 499  # only in the log and the metrics
_MAX_SUGGESTED = 200
"""Longest path for which a similar one is suggested; errors show no more characters of a path."""


@dataclass(frozen=True, slots=True)
class ShellParts:
    """The objects that the application needs in addition to its routes.

    bodies  the bound on the bytes of all bodies
    """

    config: ServerConfig
    gateway: Gateway
    authenticator: Authenticator
    metrics: ServerMetrics
    bodies: BodyRoom


def make_app(parts: ShellParts, routes: Sequence[Route]) -> ASGIApp:
    """Return the whole application for a list of routes."""
    endpoints = [route.endpoint for route in routes]
    app = FastAPI(title="quire", version=quire.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    style_of = _style_finder(endpoints)

    path_patterns = [compile_path(path)[0] for path in sorted({endpoint.path for endpoint in endpoints})]

    async def framework_error(request: Request, error: Exception) -> Response:
        return _framework_error(request, error, style_of(request.url.path), path_patterns)

    app.add_exception_handler(HTTPException, framework_error)
    for route in routes:
        app.add_api_route(
            route.endpoint.path,
            _run_route(parts, route),
            methods=[route.endpoint.method],
            response_model=None,
            include_in_schema=False,
        )
    shell = Shell(parts, routes, app)
    if not parts.config.allowed_origins:
        return shell
    # Outside of the shell, so that web pages can also read its errors.
    return CORSMiddleware(
        shell,
        allow_origins=list(parts.config.allowed_origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],  # official clients send a dozen custom headers
        expose_headers=EXPOSED_HEADERS,
    )


def _run_route(parts: ShellParts, route: Route) -> Callable[[Request], Awaitable[Response]]:
    async def run(_: Request) -> Response:
        return _AnswerResponse(_Answering(parts, route))

    return run


def _style_finder(endpoints: Sequence[Endpoint[Any]]) -> Callable[[str], ErrorStyle]:
    """Return what says of a path which API's shape its errors have: that of an endpoint with the path, or with one above it;
    Ollama's API has all of /api."""
    styles = {endpoint.path: endpoint.error_style for endpoint in endpoints if endpoint.error_style != "openai"}
    folders = [(f"{path}/", style) for path, style in styles.items()]
    folders += [("/api/", "ollama")] if "ollama" in styles.values() else []

    def style_of(path: str) -> ErrorStyle:
        found = styles.get(path)
        return found or next((style for folder, style in folders if path.startswith(folder)), "openai")

    return style_of


def _framework_error(
    request: Request, error: Exception, style: ErrorStyle, path_patterns: Collection[re.Pattern[str]]
) -> Response:
    """Answer requests without a route: an unknown path or a wrong method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    stated = error.headers if isinstance(error, HTTPException) and error.headers else {}
    allowed = next((value for name, value in stated.items() if name.lower() == "allow"), None)
    answer = _refusal(request.scope, status, style, allowed, _near_path(request.scope["path"], path_patterns))
    return Response(answer.body, answer.status, dict(answer.headers), "application/json")


def _near_path(path: str, path_patterns: Collection[re.Pattern[str]]) -> str | None:
    """Return the existing path for one without /v1, with /v1 twice, or with an extra slash; None if there is none."""
    if len(path) > _MAX_SUGGESTED:
        return None
    parts = [part for part in path.split("/") if part]
    while parts and parts[0] == "v1":
        del parts[0]
    tail = "/".join(parts)
    if not tail:
        return None
    candidates = [candidate for candidate in (f"/v1/{tail}", f"/{tail}") if candidate != path]
    return next((near for near in candidates if any(pattern.match(near) for pattern in path_patterns)), None)


def _refusal(scope: Scope, status: int, style: ErrorStyle, allowed: str | None = None, near: str | None = None) -> Ready:
    """Return the answer to what no route takes, and note its error.

    allowed  the methods of a 405
    near     the path that was probably meant, for a 404
    """
    hint = "" if near is None else f"; did you mean {near}?"
    text = {404: f"there is no {scope['path'][:200]!r} here{hint}", 405: f"{scope['method'][:20]} is not allowed here"}
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "bad_request")
    scope["quire.error"] = api = ApiError(status, text.get(status, "bad request"), code=code)
    answer = error_answer(api, api.body(style, scope.get("quire.request_id")))
    return answer if allowed is None else replace(answer, headers={**answer.headers, "allow": allowed})


class _AnswerResponse(Response):
    """The answer of an endpoint, as the response of a route."""

    def __init__(self, answering: _Answering) -> None:
        super().__init__()
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answering(scope, receive, send)


class _Answering:
    """Runs the handler of an endpoint and sends its Answer. An ASGI application."""

    __slots__ = ("_parts", "_route")

    def __init__(self, parts: ShellParts, route: Route) -> None:
        self._parts = parts
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = self._parts
        scope["quire.route"] = self._route.endpoint.path
        with parts.bodies.share() as share:
            request = Request(scope, receive, send)
            call = Call(request, scope["quire.owner"], scope["quire.request_id"], parts.config, share)
            await self._answer(call, receive, send)

    async def _answer(self, call: Call, receive: Receive, send: Send) -> None:
        parts, endpoint, scope = self._parts, self._route.endpoint, call.request.scope
        headers: dict[str, str] = {}

        def error_body(error: ApiError) -> object:
            return error.body(endpoint.error_style, call.request_id)

        def on_error(error: ApiError) -> None:
            scope["quire.error"] = error

        sender = Sender(
            receive,
            send,
            scope["quire.send"],
            error_body,
            parts.config.keep_alive_comment_s,
            headers,
            call.request_id,
            on_error,
            scope.get("quire.body"),
            scope.get("quire.is_head", False),
        )
        try:
            answer = await self._route.answer(call)
        except Exception as error:  # noqa: BLE001 - every failure becomes an answer
            api_error = as_api_error(error, call.request_id)
            if api_error.status == 413 or api_error.code == BODY_ROOM_CODE:  # the rest of the body is unread
                headers["connection"] = "close"
            await sender.send_error(api_error)
            return
        if call.ignored_params:
            headers[IGNORED_HEADER] = header_of(call.ignored_params)
            for name in call.ignored_params:
                parts.metrics.ignored_param(name.rpartition(".")[2])
        await sender.send_answer(answer)


class Shell:
    """The layer around the routes. An ASGI application.

    A path without parameters is looked up in a dict, without the router, which saves a sixth of a request's cost. `app` has all
    routes; it answers other requests and knows which paths and methods exist.
    """

    def __init__(self, parts: ShellParts, routes: Sequence[Route], app: ASGIApp) -> None:
        endpoints = [route.endpoint for route in routes]
        self._parts = parts
        self._app = app
        self._open_paths = frozenset(endpoint.path for endpoint in endpoints if endpoint.is_open and "{" not in endpoint.path)
        self._style_of = _style_finder(endpoints)
        self._plain = {
            (route.endpoint.method, route.endpoint.path): _Answering(parts, route)
            for route in reversed(routes)  # the first of two routes for a path is used, as in the router
            if "{" not in route.endpoint.path
        }
        self._allowed: dict[str, str] = {}
        for path in {path for _, path in self._plain}:
            methods = [method for method, other in self._plain if other == path]
            self._allowed[path] = ", ".join(sorted([*methods, *(["HEAD"] if "GET" in methods else [])]))
        self._root_path, self._root_path_slash = parts.config.root_path, f"{parts.config.root_path}/"
        keys = parts.config.api_keys
        self._rated_owners = frozenset(key.name for key in keys if key.requests_per_minute or key.tokens_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        if self._root_path and scope["path"].startswith(self._root_path_slash):
            scope = {**scope, "path": scope["path"][len(self._root_path) :]}
        if scope["method"] == "HEAD":  # is answered like GET; the server below leaves the body out
            scope = {**scope, "method": "GET", "quire.is_head": True}
        scope["quire.send"] = send
        headers = headers_of(scope)
        request_id = scope["quire.request_id"] = f"req_{secrets.token_hex(13)}"
        status = 0

        async def send_with_ids(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [*self._id_headers(request_id, headers), *self._rate_headers(scope)]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        try:
            scope["quire.owner"] = self._identify(scope, headers)
            await self._route(scope, receive, send_with_ids)
        except ApiError as error:
            scope["quire.error"] = error
            body = error.body(self._style_of(scope["path"]), request_id)
            await send_ready(send_with_ids, error_answer(error, body))
        except ClientGoneError:
            status = CLIENT_GONE
        finally:
            self._record(scope, status or 500, time.monotonic() - started_s)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        plain = None if scope.get("root_path") else self._plain.get((scope["method"], path))
        if plain is not None:
            await plain(scope, receive, send)
        elif not scope.get("root_path") and path in self._allowed:  # no route with parameters is to take it for one of its own
            await send_ready(send, _refusal(scope, 405, self._style_of(path), self._allowed[path]))
        else:
            await self._app(scope, receive, send)

    def _identify(self, scope: Scope, headers: Mapping[str, str]) -> Tenant:
        if scope["path"] in self._open_paths:
            return Tenant(name="anonymous", cache_salt="")
        return self._parts.authenticator.identify(headers)

    def _id_headers(self, request_id: str, headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
        value, client_id = request_id.encode(), client_id_of(headers)
        if client_id is None:
            return [(b"x-request-id", value), (b"request-id", value)]
        client_value = client_id.encode()
        return [(b"x-request-id", client_value), (b"request-id", value), (b"x-client-request-id", client_value)]

    def _rate_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Return the x-ratelimit-* headers of a key."""
        owner: Tenant | None = scope.get("quire.owner")
        if owner is None or owner.name not in self._rated_owners:
            return []
        return encode_headers(self._parts.gateway.ratelimit_headers(owner.name))

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("quire.route", "none")
        self._parts.metrics.http_request(route, status, seconds)
        error: ApiError | None = scope.pop("quire.error", None)
        if error is not None and status != CLIENT_GONE:
            self._parts.metrics.rejected(error)
        if not self._parts.config.access_log:
            return
        owner: Any = scope.get("quire.owner")
        client_id = client_id_of(headers_of(scope))
        method = "HEAD" if scope.get("quire.is_head") else scope["method"]
        level = logging.DEBUG if route in PROBES and status < 500 else logging.INFO
        if route == "/ready":  # do not log probes of a server that is not ready
            level = logging.DEBUG
        access_logger.log(
            level,
            "%s %s %d %.1f ms %s %s%s",
            method,
            route if route != "none" else repr(scope["path"][:100]),
            status,
            seconds * 1000,
            scope["quire.request_id"],
            owner.name if owner is not None else "-",
            "" if client_id is None else f" {client_id}",
            extra={
                "request_id": scope["quire.request_id"],
                "client_request_id": client_id,
                "method": method,
                "route": route,
                "status": status,
                "duration_s": round(seconds, 6),
                "owner": owner.name if owner is not None else None,
            },
        )
