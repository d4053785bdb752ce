"""FleetApp: the router's application in front of models that are loaded when requests need them."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.fleet.config import FleetConfig
from quire.fleet.manager import FleetManager, ModelStartError, Slot
from quire.fleet.metrics import FleetMetrics
from quire.router.app import RouterApp, RouterParts
from quire.router.backend import BackendTable
from quire.router.config import BackendAddress
from quire.router.health import HealthMonitor
from quire.router.incoming import Incoming
from quire.router.owners import collection_of
from quire.serving.auth import Authenticator
from quire.serving.config import ServerConfig
from quire.serving.errors import ApiError, invalid

_OPEN_PATHS = ("/health", "/ready")
_POLL_S = 0.02
_CONNECT_S = 30.0


class RouterBackends:
    """Backends of a router's table, one for each model that is loaded."""

    def __init__(self, table: BackendTable, monitor: HealthMonitor) -> None:
        self._table = table
        self._monitor = monitor

    async def add(self, address: BackendAddress) -> None:
        """Return when requests can be sent to a process. Raises ModelStartError."""
        backend = self._table.add(address, ())
        self._monitor.watch(backend)
        try:
            async with asyncio.timeout(_CONNECT_S):
                while backend.state != "ready":
                    await asyncio.sleep(_POLL_S)
        except BaseException as error:
            await self.remove(address.name)
            if isinstance(error, TimeoutError):
                raise ModelStartError(f"it does not answer the router: {backend.error}") from None
            raise

    async def remove(self, name: str) -> None:
        """Send no more requests to a model."""
        backend = self._table.get(name)
        if backend is not None:
            await self._monitor.unwatch(backend)
            self._table.remove(name)

    def is_busy(self, name: str) -> bool:
        """Return whether its process works, on requests in flight or in the background."""
        backend = self._table.get(name)
        return backend is not None and bool(backend.num_in_flight or backend.num_others)


@dataclass(frozen=True, slots=True)
class FleetParts:
    """What the application has in addition to a router's."""

    config: FleetConfig
    manager: FleetManager
    metrics: FleetMetrics


class FleetApp(RouterApp):
    """An ASGI application. Keys are checked here, before a model is loaded, and by the model's process."""

    def __init__(self, parts: RouterParts, fleet: FleetParts) -> None:
        super().__init__(parts)
        config = fleet.config
        self._fleet = fleet
        self._names = {entry.name for entry in config.models}
        self._created = int(time.time())
        self._authenticator = Authenticator(
            ServerConfig(host=config.host, port=config.port, api_keys=config.api_keys, allowed_hosts=config.allowed_hosts)
        )

    async def answer(self, incoming: Incoming) -> str:
        """Answer a request; return the name of the model that did, "none" for the router itself. Raises ApiError."""
        path = incoming.path
        if path not in _OPEN_PATHS:
            self._authenticator.identify(_texts(incoming))
        if path == "/" or path.startswith(("/router/", "/ui/")):  # the router's page shows backends
            raise ApiError(404, f"there is no {path[:200]!r} here", code="not_found")
        if collection_of(path) in ("files", "batches", "messages/batches", "conversations"):
            message = "a server with several models keeps no files, batches and conversations; use a server with one model"
            raise ApiError(404, message, code="not_found")
        # The origin was checked against the name of this server, which the model's process does not know.
        incoming.headers = [(name, value) for name, value in incoming.headers if name != b"origin"]
        return await super().answer(incoming)

    async def answer_own(self, incoming: Incoming) -> bool:
        """Answer what is the server's own; return whether it was."""
        if incoming.method == "GET" and incoming.path in _OPEN_PATHS:
            await self._answer_health(incoming)
            return True
        if incoming.method == "GET" and incoming.path == "/metrics":
            self._fleet.manager.show_metrics()
            body, media_type = self.parts.metrics.render()
            await incoming.answer(200, body + self._fleet.metrics.render(), [("content-type", media_type)])
            return True
        return await super().answer_own(incoming)

    def hold(self, model: str | None) -> AbstractAsyncContextManager[None]:
        """Return a context in which a model is loaded. Raises ApiError for a model that is not configured."""
        if model is None and len(self._names) == 1:
            (model,) = self._names
        if model is None:
            raise invalid("model is needed: there are several", "model", code="missing_required_parameter")
        if model not in self._names:
            raise self.unknown_model(model)
        return self._fleet.manager.hold(model)

    def models(self) -> dict[str, dict[str, Any]]:
        """Return the entries of all models with their states, those of aliases after them."""
        found = {slot.name: self._entry(slot) for slot in self._fleet.manager.slots}
        for alias, target in self.parts.config.aliases.items():
            found[alias] = {**found[target], "id": alias, "root": target}
        return found

    def _entry(self, slot: Slot) -> dict[str, Any]:
        served = self.parts.table.models().get(slot.name)
        plain = {"id": slot.name, "object": "model", "created": self._created, "owned_by": "quire"}
        return {**(served or plain), "state": slot.state, "memory_bytes": slot.entry.memory_bytes}

    async def _answer_health(self, incoming: Incoming) -> None:
        """/health: the server runs. /ready: it has loaded the models of preload, and takes requests."""
        manager, is_draining = self._fleet.manager, self.parts.state.is_draining
        is_good = incoming.path == "/health" or (manager.has_preloaded and not is_draining)
        good = "ok" if incoming.path == "/health" else "ready"
        body: dict[str, Any] = {"status": good if is_good else "not ready", "is_draining": is_draining}
        if self._authenticator.knows(_texts(incoming)):
            body |= {
                "memory_bytes": self._fleet.config.memory_bytes,
                "used_memory_bytes": manager.used_bytes,
                "num_waiting": manager.num_waiting,
                "models": [_describe(slot) for slot in manager.slots],
            }
        headers = [] if is_good else [("retry-after", "1")]
        await incoming.answer(200 if is_good else 503, msgspec.json.encode(body), headers)


def _describe(slot: Slot) -> dict[str, Any]:
    return {
        "name": slot.name,
        "state": slot.state,
        "memory_bytes": slot.entry.memory_bytes,
        "num_running": slot.num_held,
        "num_waiting": len(slot.waiters),
        "load_s": None if slot.load_s is None else round(slot.load_s, 3),
        "error": slot.error,
    }


def _texts(incoming: Incoming) -> dict[str, str]:
    """Return the headers; of repeated ones, the first, as a model's process does."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(incoming.headers)}
