"""RouterApp: the router as an ASGI application: which backends a request may go to, and the router's own routes."""

from __future__ import annotations

import asyncio
import hmac
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from quire.base.logging import get_logger
from quire.base.suggestions import with_guesses
from quire.router.admin import AdminApi
from quire.router.backend import Backend, BackendTable
from quire.router.config import RouterConfig
from quire.router.incoming import ClientGoneError, Incoming
from quire.router.metrics import RouterMetrics
from quire.router.owners import ObjectOwners, collection_of, object_id_of
from quire.router.policy import rendezvous
from quire.router.prompt import ParsedBody, parse_body
from quire.router.proxy import RETRY_AFTER_S, Outgoing, Proxy
from quire.serving.body_room import BodyRoom
from quire.serving.errors import ApiError, as_api_error, invalid

logger = get_logger("quire.access")

CLIENT_GONE = 499
_PATHS = frozenset(
    {"/tokenize", "/detokenize", "/score", "/rerank", "/v2/rerank", "/classify", "/pooling", "/version", "/openapi.json"}
)
"""What is passed on in addition to /v1/; the rest of a backend (its pages, its switches) is not for a router's clients."""
_REFUSED = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_MAX_NAMED_MODELS = 50


@dataclass(slots=True)
class RouterState:
    """Whether the router drains, and how many requests run."""

    is_draining: bool = False
    num_running: int = 0


@dataclass(frozen=True, slots=True)
class RouterParts:
    """What the application works with."""

    config: RouterConfig
    table: BackendTable
    proxy: Proxy
    owners: ObjectOwners
    metrics: RouterMetrics
    admin: AdminApi
    state: RouterState


class RouterApp:
    """An ASGI application."""

    def __init__(self, parts: RouterParts) -> None:
        self._parts = parts
        self._bodies = BodyRoom(parts.config.max_held_body_bytes)
        hosts = parts.config.allowed_hosts
        self._allowed_hosts = None if hosts is None else frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        if scope["method"] == "HEAD":  # answered like GET; the server below leaves the body out
            scope = {**scope, "method": "GET"}
        started_s = time.monotonic()
        state = self._parts.state
        state.num_running += 1
        with self._bodies.share() as share:
            incoming = Incoming(scope, receive, send, share)
            backend = "none"
            try:
                backend = await self._answer(incoming)
            except ClientGoneError:
                incoming.status = CLIENT_GONE
            except Exception as error:  # noqa: BLE001 - every failure becomes an answer
                await self._answer_error(incoming, error)
            finally:
                state.num_running -= 1
                self._record(incoming, backend, time.monotonic() - started_s)

    def _record(self, incoming: Incoming, backend: str, seconds: float) -> None:
        status = incoming.status or 500
        self._parts.metrics.requests.labels(backend, str(status)).add()
        level = "debug" if incoming.path in ("/health", "/ready", "/metrics") else "info"
        write = getattr(logger, level)
        write("%s %r %d %.1f ms %s", incoming.method, incoming.path[:100], status, seconds * 1000, backend)

    async def _answer_error(self, incoming: Incoming, error: Exception) -> None:
        if incoming.status:  # the head has gone out: the close tells
            logger.error("an answer broke off", exc_info=error)
            return
        api_error = as_api_error(error, incoming.header(b"x-request-id").decode("latin-1")[:128] or "-")
        is_anthropic = incoming.path.startswith("/v1/messages")
        body = api_error.anthropic_body() if is_anthropic else api_error.openai_body()
        headers = api_error.headers()
        if api_error.status == 413:  # the rest of the body is not read
            headers["connection"] = "close"
        await incoming.answer(api_error.status, msgspec.json.encode(body), headers.items())

    async def _answer(self, incoming: Incoming) -> str:
        """Answer a request; return the name of the backend that did, "none" for the router itself. Raises ApiError."""
        self._check_host(incoming)
        if await self._answer_own(incoming):
            return "none"
        if self._parts.state.is_draining:
            raise ApiError(503, "the router is shutting down", code="draining", retry_after_s=RETRY_AFTER_S)
        path = incoming.path
        if (path not in _PATHS and not path.startswith("/v1/")) or path in _REFUSED:
            raise ApiError(404, f"there is no {path[:200]!r} here", code="not_found")
        if collection_of(path) is not None and not (path.startswith("/v1/responses") and object_id_of(path) is None):
            return await self._answer_stored(incoming)
        if incoming.method == "GET":
            outgoing = Outgoing("GET", incoming.target, incoming.headers_to_send(), b"")
            return await self._watched(incoming, self._parts.proxy.send_to_any(incoming, outgoing, list(self._parts.table)))
        if incoming.method != "POST":
            raise ApiError(405, f"{incoming.method[:20]} is not allowed here", code="method_not_allowed")
        return await self._answer_inference(incoming)

    def _check_host(self, incoming: Incoming) -> None:
        """Refuse a page of another site that has made its own name point here."""
        if self._allowed_hosts is None:
            return
        host = incoming.header(b"host").decode("latin-1")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name.strip("[]") not in self._allowed_hosts:
            raise ApiError(403, f"the host name {host[:100]!r} is not one of --allowed-hosts", code="host_not_allowed")

    async def _answer_own(self, incoming: Incoming) -> bool:
        """Answer what is the router's own; return whether it was."""
        path, parts = incoming.path, self._parts
        if path == "/router/backends" or path.startswith("/router/backends/"):
            self._check_admin(incoming)
            status, body = await parts.admin.answer(incoming)
            await incoming.answer(status, msgspec.json.encode(body))
            return True
        if incoming.method != "GET":
            return False
        if path == "/metrics":
            body, media_type = parts.metrics.render()
            await incoming.answer(200, body, [("content-type", media_type)])
        elif path in ("/health", "/ready"):
            await self._answer_health(incoming)
        elif path == "/v1/models":
            await incoming.answer(200, msgspec.json.encode({"object": "list", "data": list(self._models().values())}))
        elif path.startswith("/v1/models/"):
            name = path.removeprefix("/v1/models/")
            models = self._models()
            if name not in models:
                raise self._unknown_model(name)
            await incoming.answer(200, msgspec.json.encode(models[name]))
        else:
            return False
        return True

    def _check_admin(self, incoming: Incoming) -> None:
        key = self._parts.config.admin_key
        if key is None:
            raise ApiError(403, "the admin API is off: start the router with --admin-key", code="admin_api_off")
        given = incoming.header(b"authorization").removeprefix(b"Bearer ")
        if not hmac.compare_digest(given, key.encode()):
            raise ApiError(401, "the admin API wants its key: send it as 'Authorization: Bearer KEY'", code="invalid_api_key")

    async def _answer_health(self, incoming: Incoming) -> None:
        """/health: the router runs. /ready: it has a backend to send requests to."""
        num_ready = sum([one.is_available for one in self._parts.table])
        is_draining = self._parts.state.is_draining
        is_good = incoming.path == "/health" or (num_ready > 0 and not is_draining)
        body = {
            "status": ("ok" if incoming.path == "/health" else "ready") if is_good else "not ready",
            "is_draining": is_draining,
            "num_backends": len(self._parts.table),
            "num_backends_ready": num_ready,
        }
        headers = [] if is_good else [("retry-after", "1")]
        await incoming.answer(200 if is_good else 503, msgspec.json.encode(body), headers)

    def _models(self) -> dict[str, dict[str, Any]]:
        """Return the entries of all models, those of aliases after them."""
        models = self._parts.table.models()
        for alias, target in self._parts.config.aliases.items():
            if target in models:
                models[alias] = {**models[target], "id": alias, "root": target}
        return models

    async def _answer_stored(self, incoming: Incoming) -> str:
        """Send a request about stored objects to the backend that has them."""
        proxy = self._parts.proxy
        collection, object_id = collection_of(incoming.path) or "", object_id_of(incoming.path)
        headers = incoming.headers_to_send()
        if object_id is not None:
            backend = await self._parts.owners.find(collection, object_id, incoming)
            body = b"" if incoming.method == "GET" else await incoming.read_body(self._parts.config.max_body_bytes)
            return await self._watched(
                incoming, proxy.send_to(incoming, Outgoing(incoming.method, incoming.target, headers, body), backend)
            )
        if incoming.method == "POST" and collection == "batches":
            body = await incoming.read_body(self._parts.config.max_body_bytes)
            file_id = parse_body(body).text_of("input_file_id")
            backend = self._home(incoming) if file_id is None else await self._parts.owners.find("files", file_id, incoming)
            outgoing = Outgoing("POST", incoming.target, headers, body, learns_owner=True)
            return await self._watched(incoming, proxy.send_to(incoming, outgoing, backend))
        if incoming.method == "POST":  # an upload is passed on as it comes; its close is seen while it is read
            outgoing = Outgoing("POST", incoming.target, headers, incoming.body_pieces(), learns_owner=True)
            return await proxy.send_to(incoming, outgoing, self._home(incoming))
        outgoing = Outgoing(incoming.method, incoming.target, headers, b"")
        return await self._watched(incoming, proxy.send_to(incoming, outgoing, self._home(incoming)))

    def _home(self, incoming: Incoming) -> Backend:
        """Return the backend that keeps the files and batches of a client's key."""
        if not len(self._parts.table):
            raise ApiError(503, "there is no backend", code="no_backend_available", retry_after_s=RETRY_AFTER_S)
        return rendezvous(list(self._parts.table), incoming.key_digest)[0]

    async def _answer_inference(self, incoming: Incoming) -> str:
        """Send a request to a backend that serves its model."""
        parts = self._parts
        body = await incoming.read_body(parts.config.max_body_bytes)
        received_s = time.monotonic()
        parsed = parse_body(body)
        model = parsed.model if parsed.model is None else parts.config.aliases.get(parsed.model, parsed.model)
        serving = self._serving(model)
        if model is not None and model != parsed.model:
            body = parsed.with_model(model)
        salt = (model or "").encode() + b"\0" + incoming.key_digest
        outgoing = Outgoing(
            "POST",
            incoming.target,
            incoming.headers_to_send(),
            body,
            parsed.prompt(parts.config.prefix_chunk_bytes, salt),
            is_streaming=parsed.is_streaming,
            learns_owner=incoming.path == "/v1/responses",
            received_s=received_s,
        )
        owner = await self._owner_of_previous(incoming, parsed)
        if owner is not None:
            return await self._watched(incoming, parts.proxy.send_to(incoming, outgoing, owner))
        return await self._watched(incoming, parts.proxy.send_to_any(incoming, outgoing, serving))

    async def _owner_of_previous(self, incoming: Incoming, parsed: ParsedBody) -> Backend | None:
        previous = parsed.text_of("previous_response_id") if incoming.path.startswith("/v1/responses") else None
        return None if not previous else await self._parts.owners.find("responses", previous, incoming)

    def _serving(self, model: str | None) -> list[Backend]:
        """Return the backends that serve a model, available or not. Raises ApiError where there are none."""
        table = self._parts.table
        if model is None:
            served = {frozenset(one.models) for one in table if one.models}
            if len(served) > 1:
                raise invalid("model is needed: the backends serve different ones", "model", code="missing_required_parameter")
            return list(table)
        found = [one for one in table if one.serves(model)]
        if found:
            return found
        if not any(one.models for one in table) or any(one.state == "starting" for one in table):
            message = f"no backend has said yet that it serves {model[:100]!r}"
            raise ApiError(503, message, code="no_backend_available", retry_after_s=RETRY_AFTER_S)
        raise self._unknown_model(model)

    def _unknown_model(self, model: str) -> ApiError:
        names = list(self._models())
        shown = ", ".join(names[:_MAX_NAMED_MODELS]) + (", ..." if len(names) > _MAX_NAMED_MODELS else "")
        guess = with_guesses([repr(model[:200])], [repr(name) for name in names])
        return ApiError(404, f"no backend serves the model {guess}; there are: {shown}", code="model_not_found", param="model")

    @staticmethod
    async def _watched(incoming: Incoming, work: Any) -> str:
        """Run `work` while watching the client; cancel it when the client goes. Raises ClientGoneError."""
        running = asyncio.ensure_future(work)
        if incoming.method == "GET":
            async for _ in incoming.body_pieces():
                pass
        gone = asyncio.ensure_future(incoming.wait_gone())
        try:
            await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and not incoming.has_ended:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                raise ClientGoneError
            return await running
        finally:
            for task in (running, gone):
                task.cancel()
            await asyncio.gather(running, gone, return_exceptions=True)
