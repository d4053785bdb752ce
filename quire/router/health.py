"""HealthMonitor: asks each backend whether it is ready, which models it serves, and how loaded it is; follows its KV events."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from quire.base.logging import get_logger
from quire.router.backend import Backend, BackendTable, LoadReport
from quire.router.config import RouterConfig
from quire.router.prefill_servers import PrefillServers
from quire.router.upstream import Headers, UpstreamError
from quire.serving.errors import ApiError

logger = get_logger(__name__)

_MAX_ANSWER_BYTES = 4 << 20
_MODELS_EVERY = 10
"""Questions of health for one about the models."""
_BYTES_PER_TOKEN = 4


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]]


class _Probe:
    """What is known of one backend's ways to answer: whether it has /ready and /load, and when its models are due."""

    def __init__(self) -> None:
        self.health_path = b"/ready"
        self.has_load = True
        self.num_until_models = 0


class HealthMonitor:
    """One task for each backend, from `watch` to `unwatch`."""

    def __init__(self, config: RouterConfig, table: BackendTable) -> None:
        self._config = config
        self._table = table
        self._tasks: dict[str, asyncio.Task[None]] = {}
        key = config.backend_key
        self._prefill_servers = PrefillServers(table)
        self._headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]

    def start(self) -> None:
        """Watch all backends that there are."""
        for backend in self._table:
            self.watch(backend)

    def watch(self, backend: Backend) -> None:
        """Ask a backend from now on."""
        self._tasks[backend.name] = asyncio.create_task(self._watch(backend))
        for subscriber in backend.kv_subscribers:
            subscriber.start()

    async def unwatch(self, backend: Backend) -> None:
        """Ask it no more."""
        task = self._tasks.pop(backend.name, None)
        if task is not None:
            task.cancel()
        for subscriber in backend.kv_subscribers:
            await subscriber.close()

    async def close(self) -> None:
        """Stop all questions."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        for backend in self._table:
            for subscriber in backend.kv_subscribers:
                await subscriber.close()

    async def _watch(self, backend: Backend) -> None:
        probe = _Probe()
        while True:
            try:
                await self._ask(backend, probe)
            except Exception:
                logger.exception("asking the backend %s failed", backend.name)
            await asyncio.sleep(self._config.health_interval_s)

    async def _ask(self, backend: Backend, probe: _Probe) -> None:
        """Ask once, and note what comes of it."""
        try:
            await self._ask_health(backend, probe)
            if backend.state != "ready" or probe.num_until_models <= 0:
                backend.models = await self._ask_models(backend)
                probe.num_until_models = _MODELS_EVERY
                probe.has_load = True
            probe.num_until_models -= 1
            load = await self._ask_load(backend, probe)
        except UpstreamError as error:
            self._note_failure(backend, str(error), is_refused=error.is_refused)
            return
        if backend.mark_ready():
            logger.info("backend %s is ready: %s", backend.name, ", ".join(backend.models))
        content = backend.model_content
        backend.take_load(load)
        if backend.model_content != content:
            self._warn_of_differing(backend)
        if load is not None and load.kv_blocks_total and load.block_size:
            held_bytes = load.kv_blocks_total * load.block_size * _BYTES_PER_TOKEN
            backend.prefixes.limit(min(held_bytes // self._config.prefix_chunk_bytes, self._config.max_prefix_chunks))
        await self._send_prefill_urls(backend)

    async def _send_prefill_urls(self, backend: Backend) -> None:
        """Tell a decode server the prefill servers, where it uses others."""
        urls = self._prefill_servers.news_for(backend)
        if urls is None:
            return
        body = msgspec.json.encode({"urls": urls})
        headers = [*self._headers, (b"content-type", b"application/json")]
        try:
            status, answer = await self._send(backend, "PUT", b"/prefill_urls", headers, body)
        except UpstreamError as error:
            status, answer = 0, str(error).encode()
        said = "" if status == 200 else f"{status} {answer[:500].decode(errors='replace')}"
        self._prefill_servers.note_answer(backend, urls, said)

    async def set_role(self, backend: Backend, role: str) -> None:
        """Give a server another role; it gets no new requests meanwhile. Raises ApiError where it refuses, or no other backend
        is left to answer requests for its models."""
        if role == "prefill" and not backend.is_prefill:
            others = [one for one in self._table if one is not backend and one.is_available]
            alone = [model for model in backend.models if not any(one.serves(model) for one in others)]
            if alone:
                raise ApiError(409, f"no other backend is ready that answers requests for {alone[0]!r}", code="last_backend")
        headers = [*self._headers, (b"content-type", b"application/json")]
        if backend.is_changing:
            raise ApiError(409, f"the role of the backend {backend.name} is being changed", code="role_changing")
        backend.is_changing = True
        try:
            status, answer = await self._send(backend, "PUT", b"/role", headers, msgspec.json.encode({"role": role}))
        except UpstreamError as error:
            raise ApiError(502, f"the backend {backend.name} does not take a role: {error}", code="backend_failed") from None
        finally:
            backend.is_changing = False
        if status != 200:
            text = f"the backend {backend.name} does not take the role {role!r}: {status} "
            text += answer[:500].decode(errors="replace")
            raise ApiError(status if status == 400 else 502, text, code="role_refused")
        backend.role = role
        logger.info("backend %s has the role %s now", backend.name, role)

    def _warn_of_differing(self, backend: Backend) -> None:
        for model, names in self._table.differing().items():
            if backend.name in names:
                logger.error("backends serve different models as %r: %s; streams are not continued between them", model, names)

    def _note_failure(self, backend: Backend, error: str, *, is_refused: bool) -> None:
        backend.num_probe_failures += 1
        is_over = backend.state != "ready" or backend.num_probe_failures >= self._config.max_health_failures or is_refused
        if is_over and backend.mark_unhealthy(error):
            logger.warning("backend %s is left out: %s", backend.name, error)

    async def _ask_health(self, backend: Backend, probe: _Probe) -> None:
        status, body = await self._get(backend, probe.health_path)
        if status == 404 and probe.health_path == b"/ready":  # vLLM and SGLang have /health only
            probe.health_path = b"/health"
            status, body = await self._get(backend, probe.health_path)
        if status != 200:
            path = probe.health_path.decode()
            probe.health_path = b"/ready"  # another server may listen there the next time
            raise UpstreamError(f"{path} answers {status}: {body[:200].decode(errors='replace')}")

    async def _ask_models(self, backend: Backend) -> dict[str, dict[str, Any]]:
        status, body = await self._get(backend, b"/v1/models")
        if status == 401:
            raise UpstreamError("/v1/models answers 401: it wants a key, give one as --backend-key")
        if status != 200:
            raise UpstreamError(f"/v1/models answers {status}: {body[:200].decode(errors='replace')}")
        try:
            entries = msgspec.json.decode(body, type=_ModelList).data
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UpstreamError(f"/v1/models answers what is no list of models: {error}") from None
        return {entry["id"]: entry for entry in entries if isinstance(entry.get("id"), str)}

    async def _ask_load(self, backend: Backend, probe: _Probe) -> LoadReport | None:
        """Return the report; None from a server that has none."""
        if not probe.has_load:
            return None
        status, body = await self._get(backend, b"/load")
        if status != 200:
            probe.has_load = False
            return None
        try:
            return msgspec.json.decode(body, type=LoadReport)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.warning("backend %s: /load is not understood and not asked again for now: %s", backend.name, error)
            probe.has_load = False
            return None

    async def _get(self, backend: Backend, path: bytes) -> tuple[int, bytes]:
        return await self._send(backend, "GET", path, self._headers)

    async def _send(self, backend: Backend, method: str, path: bytes, headers: Headers, body: bytes = b"") -> tuple[int, bytes]:
        timeout_s = self._config.health_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                answer = await backend.upstream.send(method, path, headers, body, idle_timeout_s=timeout_s)
                async with answer:
                    return answer.status, await answer.read(_MAX_ANSWER_BYTES)
        except TimeoutError:
            raise UpstreamError(f"{path.decode()} did not answer within {timeout_s:g} s", is_timeout=True) from None
