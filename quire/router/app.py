"""RouterApp: the router as an ASGI application: which backends a request may go to, and the router's own routes."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.types import Receive, Scope, Send

from quire.base.logging import get_logger
from quire.base.suggestions import with_guesses
from quire.router import ollama
from quire.router.admin import AdminApi
from quire.router.backend import Backend, BackendTable
from quire.router.config import RouterConfig
from quire.router.incoming import ClientGoneError, Incoming, send_error, watched
from quire.router.metrics import RouterMetrics
from quire.router.owners import ObjectOwners, collection_of, object_id_of
from quire.router.page import FORWARDED, RouterPage
from quire.router.paths import OLLAMA_PATHS, is_passed_on, refusal
from quire.router.policy import rendezvous
from quire.router.prompt import ParsedBody, parse_body
from quire.router.prompt_tokens import PromptTokens
from quire.router.proxy import RETRY_AFTER_S, Outgoing, Proxy
from quire.router.timelines import RouterTimelines
from quire.serving.body_room import BodyRoom
from quire.serving.errors import ApiError, invalid
from quire.serving.hosts import HostCheck

logger = get_logger("quire.access")

CLIENT_GONE = 499
_MAX_NAMED_MODELS = 50
_POLL_S = 0.05


@dataclass(slots=True)
class RouterState:
    """Whether the router drains, and how many requests run."""

    is_draining: bool = False
    num_running: int = 0

    async def drained(self, timeout_s: float) -> None:
        """Return when no request runs any more, or after the timeout."""
        end_s = time.monotonic() + timeout_s
        while self.num_running and time.monotonic() < end_s:
            await asyncio.sleep(_POLL_S)


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
    tokens: PromptTokens
    page: RouterPage


class RouterApp:
    """An ASGI application."""

    def __init__(self, parts: RouterParts) -> None:
        self.parts = parts
        self._timelines = RouterTimelines(parts.table)
        self._bodies = BodyRoom(parts.config.max_held_body_bytes)
        self._hosts = HostCheck(parts.config.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        if scope["method"] == "HEAD":  # answered like GET; the server below leaves the body out
            scope = {**scope, "method": "GET"}
        started_s = time.monotonic()
        state = self.parts.state
        state.num_running += 1
        with self._bodies.share() as share:
            incoming = Incoming(scope, receive, send, share)
            backend = "none"
            try:
                backend = await self.answer(incoming)
            except ClientGoneError:
                incoming.status = CLIENT_GONE
            except Exception as error:  # noqa: BLE001 - every failure becomes an answer
                await send_error(incoming, error)
            finally:
                state.num_running -= 1
                self._record(incoming, backend, time.monotonic() - started_s)

    def _record(self, incoming: Incoming, backend: str, seconds: float) -> None:
        status = incoming.status or 500
        self.parts.metrics.requests.labels(backend, str(status)).add()
        level = "debug" if incoming.path in ("/health", "/ready", "/metrics") else "info"
        write = getattr(logger, level)
        write("%s %r %d %.1f ms %s", incoming.method, incoming.path[:100], status, seconds * 1000, backend)

    async def answer(self, incoming: Incoming) -> str:
        """Answer a request; return the name of the backend that did, "none" for the router itself. Raises ApiError."""
        host = incoming.header(b"host")
        self._hosts.check(host.decode("latin-1") if host else None)
        if await self.answer_own(incoming):
            return "none"
        if self.parts.state.is_draining:
            raise ApiError(503, "the router is shutting down", code="draining", retry_after_s=RETRY_AFTER_S)
        path = incoming.path
        if path in FORWARDED and incoming.method == "GET" and self.parts.config.enable_page:
            return await self._answer_for_page(incoming)
        if not is_passed_on(path):
            raise ApiError(404, refusal(path), code="not_found")
        if collection_of(path) is not None and not (path.startswith("/v1/responses") and object_id_of(path) is None):
            return await self._answer_stored(incoming)
        if incoming.method == "GET" and RouterTimelines.is_asked(path):
            return await watched(incoming, self._timelines.answer(incoming))
        if incoming.method == "GET":
            outgoing = Outgoing("GET", incoming.target, incoming.headers_to_send(), b"")
            return await watched(incoming, self.parts.proxy.send_to_any(incoming, outgoing, self.parts.table.serving()))
        if incoming.method != "POST":
            raise ApiError(405, f"{incoming.method[:20]} is not allowed here", code="method_not_allowed")
        return await self._answer_inference(incoming)

    async def answer_own(self, incoming: Incoming) -> bool:
        """Answer what is the router's own; return whether it was."""
        path, parts = incoming.path, self.parts
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
            await incoming.answer(200, msgspec.json.encode({"object": "list", "data": list(self.models().values())}))
        elif (listed := ollama.answer_list(path, self.models(), self.parts.table.models())) is not None:
            await incoming.answer(200, msgspec.json.encode(listed))
        elif path.startswith("/v1/models/"):
            name = path.removeprefix("/v1/models/")
            models = self.models()
            if name not in models:
                raise self.unknown_model(name)
            await incoming.answer(200, msgspec.json.encode(models[name]))
        else:
            file = parts.page.answer(path, incoming.header(b"if-none-match").decode("latin-1"))
            if file is None:
                return False
            body, headers = file.body or b"", {**file.headers, "content-type": file.media_type}
            await incoming.answer(file.status, body, headers.items())
        return True

    def _check_admin(self, incoming: Incoming) -> None:
        key = self.parts.config.admin_key
        if key is None:
            raise ApiError(403, "the admin API is off: start the router with --admin-key", code="admin_api_off")
        given = incoming.header(b"authorization").removeprefix(b"Bearer ")
        if not hmac.compare_digest(given, key.encode()):
            raise ApiError(401, "the admin API wants its key: send it as 'Authorization: Bearer KEY'", code="invalid_api_key")

    async def _answer_health(self, incoming: Incoming) -> None:
        """/health: the router runs. /ready: it has a backend to send requests to."""
        num_ready = sum([one.is_available for one in self.parts.table])
        is_draining = self.parts.state.is_draining
        is_good = incoming.path == "/health" or (num_ready > 0 and not is_draining)
        body: dict[str, Any] = {
            "status": ("ok" if incoming.path == "/health" else "ready") if is_good else "not ready",
            "is_draining": is_draining,
            "num_backends": len(self.parts.table),
            "num_backends_ready": num_ready,
        }
        silent = [one.name for one in self.parts.table if any(sub.state == "silent" for sub in one.kv_subscribers)]
        if silent:
            body["kv_events_silent"] = silent
        differing = self.parts.table.differing()
        if differing:
            body["models_differ"] = differing
        headers = [] if is_good else [("retry-after", "1")]
        await incoming.answer(200 if is_good else 503, msgspec.json.encode(body), headers)

    def models(self) -> dict[str, dict[str, Any]]:
        """Return the entries of all models, those of aliases after them."""
        models = self.parts.table.models()
        for alias, target in self.parts.config.aliases.items():
            if target in models:
                models[alias] = {**models[target], "id": alias, "root": target}
        return models

    async def _answer_stored(self, incoming: Incoming) -> str:
        """Send a request about stored objects to the backend that has them."""
        proxy = self.parts.proxy
        collection, object_id = collection_of(incoming.path) or "", object_id_of(incoming.path)
        headers = incoming.headers_to_send()
        if object_id is not None:
            backend = await self.parts.owners.find(collection, object_id, incoming)
            body = b"" if incoming.method == "GET" else await incoming.read_body(self.parts.config.max_body_bytes)
            return await watched(
                incoming, proxy.send_to(incoming, Outgoing(incoming.method, incoming.target, headers, body), backend)
            )
        if incoming.method == "POST" and collection == "batches":
            body = await incoming.read_body(self.parts.config.max_body_bytes)
            file_id = parse_body(body).text_of("input_file_id")
            backend = self._home(incoming) if file_id is None else await self.parts.owners.find("files", file_id, incoming)
            outgoing = Outgoing("POST", incoming.target, headers, body, learns_owner=True)
            return await watched(incoming, proxy.send_to(incoming, outgoing, backend))
        if incoming.method == "POST" and collection == "conversations":  # on any backend: what continues it goes there too
            body = await incoming.read_body(self.parts.config.max_body_bytes)
            outgoing = Outgoing("POST", incoming.target, headers, body, learns_owner=True)
            return await watched(incoming, proxy.send_to_any(incoming, outgoing, self.parts.table.serving()))
        if incoming.method == "POST":  # an upload is passed on as it comes; its close is seen while it is read
            outgoing = Outgoing("POST", incoming.target, headers, incoming.body_pieces(), learns_owner=True)
            return await proxy.send_to(incoming, outgoing, self._home(incoming))
        outgoing = Outgoing(incoming.method, incoming.target, headers, b"")
        return await watched(incoming, proxy.send_to(incoming, outgoing, self._home(incoming)))

    def _home(self, incoming: Incoming) -> Backend:
        """Return the backend that keeps the files and batches of a client's key."""
        serving = self.parts.table.serving()
        if not serving:
            raise ApiError(503, "there is no backend", code="no_backend_available", retry_after_s=RETRY_AFTER_S)
        return rendezvous(serving, incoming.key_digest)[0]

    async def _answer_for_page(self, incoming: Incoming) -> str:
        """Ask a backend that serves the model of ?model= for what the page needs of it; without one, any backend."""
        named = parse_qs(incoming.target.partition(b"?")[2].decode("latin-1")).get("model")
        serving = self._serving(self.parts.config.aliases.get(named[0], named[0]) if named else None)
        outgoing = Outgoing("GET", incoming.target, incoming.headers_to_send(), b"")
        return await watched(incoming, self.parts.proxy.send_to_any(incoming, outgoing, serving))

    async def _answer_inference(self, incoming: Incoming) -> str:
        """Send a request to a backend that serves its model."""
        body = await incoming.read_body(self.parts.config.max_body_bytes)
        return await watched(incoming, self._answer_body(incoming, body, time.monotonic()))

    def hold(self, model: str | None) -> AbstractAsyncContextManager[None]:
        """Return a context in which a model's backend stays: for subclasses that load models on demand."""
        return contextlib.nullcontext()

    async def _answer_body(self, incoming: Incoming, body: bytes, received_s: float) -> str:
        parsed = parse_body(body)
        model = self._model_of(incoming, parsed)
        begin_s = time.monotonic()
        async with self.hold(model):
            received_s += time.monotonic() - begin_s  # a wait for a model is not the router's own part
            return await self._send_inference(incoming, parsed, body, received_s)

    def _model_of(self, incoming: Incoming, parsed: ParsedBody) -> str | None:
        """Return the model that a request is for: of Azure's URLs the deployment."""
        model = parsed.model if incoming.deployment is None else incoming.deployment
        if incoming.path in OLLAMA_PATHS:
            model = parsed.text_of("name") if model is None else model
            model = None if model is None else ollama.plain_model(model, self.models())
        return None if model is None else self.parts.config.aliases.get(model, model)

    async def _send_inference(self, incoming: Incoming, parsed: ParsedBody, body: bytes, received_s: float) -> str:
        parts = self.parts
        model = self._model_of(incoming, parsed)
        serving = self._serving(model)
        if model is not None and model != parsed.model:
            body = parsed.with_model(model)
        salt = (model or "").encode() + b"\0" + incoming.key_digest
        prompt = parsed.prompt(parts.config.prefix_chunk_bytes, salt)
        owner = await self._owner_of_previous(incoming, parsed)
        if owner is None:
            prompt = await parts.tokens.of(prompt, parsed, incoming, serving, model)
        outgoing = Outgoing(
            "POST",
            incoming.target,
            incoming.headers_to_send(),
            body,
            prompt,
            is_streaming=parsed.is_streaming(incoming.path),
            learns_owner=incoming.path == "/v1/responses",
            received_s=received_s,
        )
        if owner is not None:
            if not owner.serves(model):
                raise _other_model(model, owner, parsed)
            return await parts.proxy.send_to(incoming, outgoing, owner)
        return await parts.proxy.send_to_any(incoming, outgoing, serving)

    async def _owner_of_previous(self, incoming: Incoming, parsed: ParsedBody) -> Backend | None:
        if not incoming.path.startswith("/v1/responses"):
            return None
        for collection, field in (("responses", "previous_response_id"), ("conversations", "conversation")):
            object_id = parsed.id_of(field)
            if object_id:
                return await self.parts.owners.find(collection, object_id, incoming)
        return None

    def _serving(self, model: str | None) -> list[Backend]:
        """Return the backends that serve a model, available or not. Raises ApiError where there are none."""
        table = self.parts.table
        if model is None:
            served = {frozenset(one.models) for one in table if one.models and not one.is_prefill}
            if len(served) > 1:
                raise invalid("model is needed: the backends serve different ones", "model", code="missing_required_parameter")
            return [one for one in table if one.serves(None)]
        found = [one for one in table if one.serves(model)]
        if found:
            return found
        if not any(one.models for one in table) or any(one.state == "starting" for one in table):
            message = f"no backend has said yet that it serves {model[:100]!r}"
            raise ApiError(503, message, code="no_backend_available", retry_after_s=RETRY_AFTER_S)
        if any(one.is_prefill and model in one.models for one in table):
            message = f"only prefill servers have {model[:100]!r}, which answer no requests: start a decode server"
            raise ApiError(503, message, code="no_backend_available", retry_after_s=RETRY_AFTER_S)
        raise self.unknown_model(model)

    def unknown_model(self, model: str) -> ApiError:
        """Return the error for a model that there is not."""
        names = list(self.models())
        shown = ", ".join(names[:_MAX_NAMED_MODELS]) + (", ..." if len(names) > _MAX_NAMED_MODELS else "")
        guess = with_guesses([repr(model[:200])], [repr(name) for name in names])
        return ApiError(404, f"no backend serves the model {guess}; there are: {shown}", code="model_not_found", param="model")


def _other_model(model: str | None, owner: Backend, parsed: ParsedBody) -> ApiError:
    """Return the error for a request that continues what another model's server keeps."""
    field = next((name for name in ("previous_response_id", "conversation") if parsed.id_of(name)), "previous_response_id")
    message = (
        f"{field} {(parsed.id_of(field) or '')[:100]!r} is kept by a server of {', '.join(owner.models) or 'no model'}, which "
        f"does not serve the model {(model or '')[:100]!r}: ask that model, or send the whole conversation as input"
    )
    return invalid(message, field, code="model_mismatch")
