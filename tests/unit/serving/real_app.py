"""The real application, shell and all, over a gateway that plays a script; clients talk to it without a socket."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from quire.serving.anthropic.endpoints import ENDPOINTS as ANTHROPIC_ENDPOINTS
from quire.serving.auth import Authenticator
from quire.serving.body_room import BodyRoom
from quire.serving.config import ServerConfig
from quire.serving.context import ServerContext, ServerState
from quire.serving.core.served_model import ServedModel
from quire.serving.endpoint import bind
from quire.serving.errors import ApiError
from quire.serving.http.app import ShellParts, make_app
from quire.serving.ollama.endpoints import ENDPOINTS as OLLAMA_ENDPOINTS
from quire.serving.responses.create import ResponseRoutes
from quire.serving.responses.endpoints import ENDPOINTS as RESPONSES_ENDPOINTS
from quire.serving.responses.store import ResponseStore
from tests.unit.serving.fakes import FakeGateway

BASE = "http://127.0.0.1"
RANDOM = re.compile(r'\b(msg|rs|fc|fco|resp)_[A-Za-z0-9]{29}\b|call_[A-Za-z0-9]{24}|"(created_at|completed_at)":\d+')


class Metrics:
    """Takes what the shell reports."""

    def http_request(self, route: str, status: int, seconds: float) -> None:
        """Count nothing."""

    def rejected(self, error: ApiError) -> None:
        """Count nothing."""

    def ignored_param(self, name: str) -> None:
        """Count nothing."""


@dataclass
class App:
    """A running application."""

    gateway: FakeGateway
    responses: ResponseRoutes
    parts: ShellParts
    transport: httpx2.ASGITransport

    def http(self, **options: Any) -> httpx2.AsyncClient:
        """Return a client of the library that the official clients are built on."""
        return httpx2.AsyncClient(transport=self.transport, base_url=BASE, **options)

    async def post(self, path: str, body: object, **headers: str) -> httpx2.Response:
        """Send a body, JSON unless it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http() as client:
            return await client.post(path, content=data, headers={"content-type": "application/json", **headers})


@contextlib.asynccontextmanager
async def running_app(
    gateway: FakeGateway, served: ServedModel, config: ServerConfig | None = None, folder: Path | None = None
) -> AsyncIterator[App]:
    """Yield the application; responses are stored in `folder`, or in memory."""
    config = config or ServerConfig()
    context = ServerContext(config=config, gateway=gateway, served=served, state=ServerState("serving"))
    responses = ResponseRoutes(context, ResponseStore(folder))
    bodies = BodyRoom(config.max_held_body_bytes)
    parts = ShellParts(config, gateway, Authenticator(config), Metrics(), bodies)  # type: ignore[arg-type]
    routes = (
        *bind(ANTHROPIC_ENDPOINTS, context),
        *bind(OLLAMA_ENDPOINTS, context),
        *bind(RESPONSES_ENDPOINTS, responses),
    )
    try:
        yield App(gateway, responses, parts, httpx2.ASGITransport(make_app(parts, routes)))  # type: ignore[arg-type]
    finally:
        assert responses.opened is not None
        await responses.background.close()
        await responses.opened.close()


def fix(text: str) -> str:
    """Return a text with ids numbered by their first appearance, and times as 1."""
    numbers: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        if found[2] is not None:
            return f'"{found[2]}":1'
        prefix = found[0].partition("_")[0]
        count = sum(name.startswith(f"{prefix}_") for name in numbers)
        return numbers.setdefault(found[0], f"{prefix}_{count + 1}")

    return RANDOM.sub(number, text)


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of a stream, which has to be well formed, by name."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    found: list[tuple[str, dict[str, Any]]] = []
    for block in blocks:
        name, data = block.split("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert found[-1][1]["type"] == found[-1][0]
    return found


def names_of(text: str) -> Sequence[str]:
    """Return the names of the events of a stream."""
    return [name for name, _ in events_of(text)]
