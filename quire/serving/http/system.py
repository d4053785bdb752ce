"""What is asked about the server itself: is it alive, is it ready, which version, its metrics."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Literal

import msgspec

import quire
from quire.serving.answers import Answer, Ready
from quire.serving.context import ServerContext
from quire.serving.endpoint import Call, Endpoint
from quire.serving.errors import invalid
from quire.serving.http.openapi import document
from quire.serving.public_error import show_error


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Ready:
    return Ready(msgspec.json.encode(body), status, headers or {})


class Health(msgspec.Struct):
    """Whether the engine lives; the last two are left out for those who may not know.

    error       why it does not live; None where no reason is known, left out while it lives
    last_error  why it ended the last time, while it lives again; None where it never ended, left out while it does not live
    """

    status: Literal["ok", "unhealthy"]
    phase: str
    engine: str
    heartbeat_age_s: float | None
    error: str | msgspec.UnsetType | None = msgspec.UNSET
    last_error: str | msgspec.UnsetType | None = msgspec.UNSET


class Readiness(msgspec.Struct, omit_defaults=True):
    """Whether requests are taken; if not, why."""

    status: Literal["ready", "not ready"]
    reason: str | None = None


class Version(msgspec.Struct):
    """Of quire."""

    version: str


async def health(context: ServerContext, call: Call) -> Answer:
    """Whether the engine lives and moves; where it does not, and to those with a key, in the engine's own words."""
    client = context.client
    is_alive = client.state == "ready" and client.heartbeat_age_s < context.config.watchdog_timeout_s
    age_s = client.heartbeat_age_s
    body = Health(
        status="ok" if is_alive else "unhealthy",
        phase=context.phase,
        engine=client.state,
        heartbeat_age_s=round(age_s, 3) if math.isfinite(age_s) else None,
    )
    if context.authenticator.knows(call.request.headers):
        error = context.failure or client.last_error
        shown = None if error is None else show_error(error)
        if is_alive:
            body.last_error = shown
        else:
            body.error = shown
    return _json(body, 200 if is_alive else 503)


async def ready(context: ServerContext, call: Call) -> Answer:
    """Whether new requests would be taken: for load balancers."""
    is_ready = context.phase == "serving" and context.client.state == "ready" and context.served is not None
    if is_ready:
        return _json(Readiness("ready"))
    reason = context.phase if context.phase != "serving" else f"engine {context.client.state}"
    return _json(Readiness("not ready", reason), 503, {"retry-after": "1"})


async def version(context: ServerContext, call: Call) -> Answer:
    """The version of quire."""
    return _json(Version(quire.__version__))


async def metrics(context: ServerContext, call: Call) -> Answer:
    """All metrics in Prometheus' text format."""
    compat = call.query.get("compat")
    if compat not in (None, "vllm"):
        raise invalid(f"compat must be 'vllm' or absent, got {compat[:50]!r}", "compat")
    body, media_type = context.metrics.render(compat=compat)
    return Ready(body, media_type=media_type)


def make_endpoints(others: tuple[Endpoint, ...], is_metrics_enabled: bool) -> tuple[Endpoint, ...]:
    """Return the endpoints of this module; the OpenAPI description covers `others` too."""
    compat = {"name": "compat", "in": "query", "required": False, "schema": {"enum": ["vllm"]}}
    found = [
        Endpoint(
            method="GET",
            path="/health",
            handler=health,
            summary="Whether the engine lives",
            tag="system",
            answer=Health,
            other_answers={503: Health},
            is_open=True,
        ),
        Endpoint(
            method="GET",
            path="/ready",
            handler=ready,
            summary="Whether requests are taken",
            tag="system",
            answer=Readiness,
            other_answers={503: Readiness},
            is_open=True,
        ),
        Endpoint(method="GET", path="/version", handler=version, summary="The version", tag="system", answer=Version),
    ]
    if is_metrics_enabled:
        found.append(
            Endpoint(
                method="GET",
                path="/metrics",
                handler=metrics,
                summary="Prometheus metrics",
                tag="system",
                query=(compat,),
                success_media_type="text/plain",
            )
        )
    description: list[bytes] = []

    async def openapi(context: ServerContext, call: Call) -> Answer:
        if not description:
            maxima = {"n": context.config.max_n, "best_of": context.config.max_n}
            description.append(
                await asyncio.to_thread(lambda: msgspec.json.encode(document("quire", quire.__version__, listed, maxima)))
            )
        return Ready(description[0])

    found.append(
        Endpoint(
            method="GET",
            path="/openapi.json",
            handler=openapi,
            summary="The description of this API",
            tag="system",
            answer=dict[str, Any],
        )
    )
    listed = (*others, *found)
    return tuple(found)
