"""AdminApi: backends are listed, added, drained and removed while the router runs."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from quire.base.errors import ConfigError
from quire.router.backend import Backend, BackendTable
from quire.router.config import KvEventSource, parse_backend
from quire.router.health import HealthMonitor
from quire.router.incoming import Incoming
from quire.router.kv_subscriber import KvSubscriber
from quire.serving.errors import ApiError, invalid

PATH = "/router/backends"
_MAX_BODY_BYTES = 64 << 10
_ACTIONS = ("drain", "resume")
_Body = TypeVar("_Body")


class NewBackend(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /router/backends`."""

    url: str
    kv_events_endpoint: str | None = None
    kv_events_replay_endpoint: str | None = None

    def sources(self) -> tuple[KvEventSource, ...]:
        """Return where it publishes KV events. Raises ConfigError."""
        if self.kv_events_endpoint is None:
            if self.kv_events_replay_endpoint is not None:
                raise ConfigError("kv_events_replay_endpoint needs kv_events_endpoint")
            return ()
        return (KvEventSource(self.kv_events_endpoint, self.kv_events_replay_endpoint),)


class NewRole(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `PUT /router/backends/NAME/role`."""

    role: Literal["both", "prefill", "decode"]


class AdminApi:
    """The routes below /router/backends, for those who have the admin key.

    GET /router/backends                   all backends with their state and load
    POST /router/backends {"url"}          add one; it gets requests once it answers
    DELETE /router/backends/NAME           take one out; what runs there goes on
    POST /router/backends/NAME/drain       send no new requests there; /resume: send them again
    PUT /router/backends/NAME/role {"role"}  give a quire server another role: both, prefill or decode
    """

    def __init__(self, table: BackendTable, monitor: HealthMonitor) -> None:
        self._table = table
        self._monitor = monitor

    async def answer(self, incoming: Incoming) -> tuple[int, object]:
        """Return the status and the body of an answer. Raises ApiError."""
        name, _, action = incoming.path.removeprefix(PATH).strip("/").partition("/")
        method = incoming.method
        if not name:
            if method == "GET":
                return 200, {"backends": [describe(backend) for backend in self._table]}
            if method == "POST":
                return 201, describe(await self._add(incoming))
            raise self._wrong_method(method)
        backend = self._table.get(name)
        if backend is None:
            known = ", ".join(one.name for one in self._table) or "none"
            raise ApiError(404, f"there is no backend {name[:100]!r}; there are: {known}", code="not_found")
        if not action and method == "GET":
            return 200, describe(backend)
        if not action and method == "DELETE":
            await self._monitor.unwatch(backend)
            self._table.remove(name)
            return 200, describe(backend)
        if action == "role" and method == "PUT":
            await self._monitor.set_role(backend, (await self._read(incoming, NewRole)).role)
            return 200, describe(backend)
        if action in _ACTIONS and method == "POST":
            backend.is_draining = action == "drain"
            return 200, describe(backend)
        if action and action not in (*_ACTIONS, "role"):
            raise ApiError(404, f"a backend can be sent {', '.join(_ACTIONS)} and role, got {action[:50]!r}", code="not_found")
        raise self._wrong_method(method)

    @staticmethod
    async def _read(incoming: Incoming, kind: type[_Body]) -> _Body:
        body = await incoming.read_body(_MAX_BODY_BYTES)
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            example = (
                '{"url": "http://host:port"}' if kind is NewBackend else '{"role": "decode"}, with both, prefill or decode'
            )
            raise invalid(f"the body must be like {example}: {error}", code="invalid_json") from None

    async def _add(self, incoming: Incoming) -> Backend:
        new = await self._read(incoming, NewBackend)
        try:
            address = parse_backend(new.url)
        except ConfigError as error:
            raise invalid(str(error), "url") from None
        try:
            sources = new.sources()
        except ConfigError as error:
            raise invalid(str(error), "kv_events_endpoint") from None
        try:
            backend = self._table.add(address, sources)
        except ConfigError as error:
            raise ApiError(409, str(error), code="backend_exists", param="url") from None
        self._monitor.watch(backend)
        return backend

    @staticmethod
    def _wrong_method(method: str) -> ApiError:
        return ApiError(405, f"{method[:20]} is not allowed here", code="method_not_allowed")


def describe(backend: Backend) -> dict[str, Any]:
    """Return what the admin API says of a backend."""
    load = backend.load
    return {
        "name": backend.name,
        "url": backend.address.url,
        "state": backend.state,
        "is_draining": backend.is_draining,
        "role": backend.role,
        "prefill_url": backend.prefill_url,
        "error": backend.error,
        "models": list(backend.models),
        "num_in_flight": backend.num_in_flight,
        "num_others": backend.num_others,
        "num_queued_tokens": backend.num_queued_tokens,
        "num_prefix_chunks": len(backend.prefixes),
        "prompt_tokens": {name: getattr(backend.prompt_counts, name) for name in ("sent", "predicted", "served", "cached")},
        "ms_per_prompt": None if backend.cost is None else round(backend.cost.s_per_prompt * 1000, 4),
        "ms_per_prompt_token": None if backend.cost is None else round(backend.cost.s_per_token * 1000, 4),
        "kv_events": [_describe_events(subscriber) for subscriber in backend.kv_subscribers],
        "load": None if load is None else msgspec.to_builtins(load),
    }


def _describe_events(subscriber: KvSubscriber) -> dict[str, Any]:
    counts = subscriber.counts
    return {
        "state": subscriber.state,
        "is_complete": subscriber.is_complete,
        "num_blocks": len(subscriber.index),
        "num_batches": counts.num_batches,
        "num_gaps": counts.num_gaps,
        "num_lost": counts.num_lost,
        "num_restarts": counts.num_restarts,
        "num_invalid": counts.num_invalid,
    }
