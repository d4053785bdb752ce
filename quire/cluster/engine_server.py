"""EngineServer: `quire serve` of one replica of the Ray Serve application, and what passes requests to it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quire.base.errors import QuireError
from quire.base.logging import get_logger
from quire.base.private_folder import PrivateFolder
from quire.cluster.autoscale_policy import OUTPUT_TOKENS, PROMPT_TOKENS, QUEUED_TOKENS, RECENT_SHARE
from quire.cluster.config import RayServeConfig
from quire.cluster.messages import AnswerFailure, AnswerHead, ForwardedRequest, Headers
from quire.cluster.replica_choice import ReplicaStats
from quire.fleet.process import COMMAND, KEY_VARIABLE, ServerProcess, child_environment
from quire.router.backend import Backend, LoadReport
from quire.router.config import BackendAddress
from quire.router.prefix_index import PrefixIndex
from quire.router.upstream import Upstream, UpstreamError

logger = get_logger(__name__)

_FOLDER_PREFIX = "quire-ray-"
_CONNECT_TIMEOUT_S = 5.0
_ASK_TIMEOUT_S = 10.0
_IDLE_TIMEOUT_S = 600.0
_MAX_ANSWER_BYTES = 8 << 20
_STOP_S = 30.0
"""For the server to end after its requests have ended, which Ray waits for before."""
_MEAN_S = 45.0
_RECENT_S = 5.0
_NUM_PROMPT_TOKENS, _NUM_OUTPUT_TOKENS = "quire:prompt_tokens_total", "quire:generation_tokens_total"
_NUM_QUEUED, _NUM_REFUSED, _NUM_ENDED = (
    *("quire:queue_prompt_tokens", "quire:admission_rejections_total"),
    "quire:request_success_total",
)
_SAMPLED = (_NUM_PROMPT_TOKENS, _NUM_OUTPUT_TOKENS, _NUM_QUEUED, _NUM_REFUSED, _NUM_ENDED)


class ReplicaError(QuireError):
    """The engine's server did not start, has ended, or does not answer."""


class EngineServer:
    """A running server; `close` ends it."""

    def __init__(self, backend: Backend, folder: PrivateFolder, process: ServerProcess, headers: Headers) -> None:
        """Use `start`. headers: of the questions about health and load."""
        self._backend = backend
        self._folder = folder
        self._process = process
        self._headers = headers
        self._rates = TokenRates()

    @classmethod
    async def start(cls, config: RayServeConfig, name: str, command: Sequence[str] = COMMAND) -> EngineServer:
        """Start a server and return when it is ready. Raises ReplicaError and ModelStartError.

        name     of the replica, for answers' heads
        command  takes the id of this process and the file of the options
        """
        folder = PrivateFolder(_FOLDER_PREFIX)
        path, file = folder.path / "server.sock", folder.path / "options.json"
        address = BackendAddress("localhost", 80, uds=str(path), label=name)
        options, headers = _server_options(config, path, secrets.token_urlsafe(32))
        file.write_text(json.dumps(options), encoding="utf-8")
        try:
            process = await _start_process((*command, str(os.getpid()), str(file)), address)
        except OSError as error:
            folder.close()
            raise ReplicaError(f"the server of {config.model} cannot be started: {error}") from None
        server = cls(Backend(address, Upstream(address, _CONNECT_TIMEOUT_S), PrefixIndex(1)), folder, process, headers)
        try:
            async with asyncio.timeout(config.start_timeout_s):
                await process.wait_ready()
        except TimeoutError:
            await server.close()
            raise ReplicaError(f"the server of {config.model} was not ready in {config.start_timeout_s:g} s") from None
        except BaseException:
            await server.close()
            raise
        server._backend.mark_ready()
        return server

    async def forward(self, request: ForwardedRequest) -> AsyncIterator[AnswerHead | bytes | AnswerFailure]:
        """Send a request to the server; yield the head of its answer and the pieces of its body.

        Leaving it early closes the connection, which ends the request in the engine.
        """
        backend = self._backend
        num_prompt_tokens = 0 if request.prompt is None else request.prompt.num_tokens
        flight = backend.begin(num_prompt_tokens, request.is_streaming)
        is_good = False
        try:
            answer = await backend.upstream.send(
                request.method, request.target, request.headers, request.body, idle_timeout_s=_IDLE_TIMEOUT_S
            )
            async with answer:
                piece = await answer.next_piece()
                backend.first_byte(flight, is_good=answer.status == 200)
                yield AnswerHead(answer.status, answer.headers, self._backend.name)
                while piece:
                    yield piece
                    piece = await answer.next_piece()
                is_good = answer.status == 200
        except UpstreamError as error:
            logger.warning("the engine's server failed: %s", error)
            yield AnswerFailure(str(error), error.is_timeout)
        finally:
            backend.end(flight, is_good=is_good and request.prompt is not None)

    async def check_health(self) -> None:
        """Return if the engine works; Ray replaces a replica for which this raises. Raises ReplicaError."""
        if not self._process.is_running:
            raise ReplicaError("the engine's server has ended; its log says why")
        status, body = await self._ask(b"/health")
        if status != 200:
            raise ReplicaError(f"/health answers {status}: {body[:300].decode(errors='replace')}")

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return a ReplicaStats for the routers, as Ray carries it. Raises ReplicaError."""
        status, body = await self._ask(b"/load")
        load = msgspec.json.decode(body, type=LoadReport) if status == 200 else None
        return msgspec.to_builtins(ReplicaStats(load, self._backend.cost, self._backend.request_s))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the figures of AutoscalePolicy. Raises ReplicaError."""
        status, body = await self._ask(b"/metrics")
        if status != 200:
            raise ReplicaError(f"/metrics answers {status}")
        self._rates.add(time.monotonic(), read_totals(body.decode(), _SAMPLED))
        return self._rates.figures()

    async def close(self) -> None:
        """End the server: what it still runs has some seconds to end."""
        await self._process.stop()
        self._backend.upstream.close()
        self._folder.close()

    async def _ask(self, path: bytes) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                answer = await self._backend.upstream.send("GET", path, self._headers, idle_timeout_s=_ASK_TIMEOUT_S)
                async with answer:
                    return answer.status, await answer.read(_MAX_ANSWER_BYTES)
        except (TimeoutError, UpstreamError) as error:
            raise ReplicaError(f"the engine's server does not answer {path.decode()}: {error}") from None


def _server_options(config: RayServeConfig, path: Path, key: str) -> tuple[dict[str, Any], Headers]:
    """Return the options of the server, and the headers of the replica's own questions.

    Where clients need a key, the replica has one too: `key`. As for `quire serve`, the key may be in the environment, which the
    server itself does not get.
    """
    named = {name.replace("_", "-"): value for name, value in config.options.items()}
    options: dict[str, Any] = {"page": "false", **named, "model": config.model, "uds": str(path)}
    options["max-body-bytes"] = str(config.max_body_bytes)
    given = options.pop("api-key", None) or os.environ.get(KEY_VARIABLE)
    if not given and "api-key-file" not in options:
        return options, []
    keys = [] if not given else [given] if isinstance(given, str) else list(given)
    options["api-key"] = [*keys, key]
    return options, [(b"authorization", b"Bearer " + key.encode())]


async def _start_process(command: Sequence[str], address: BackendAddress) -> ServerProcess:
    """Start a process from a thread that lives as long: the kernel ends the process with the thread that started it."""
    loop = asyncio.get_running_loop()
    started: asyncio.Future[subprocess.Popen[bytes]] = loop.create_future()

    def run() -> None:
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env=child_environment(), start_new_session=True)
        except OSError as error:
            loop.call_soon_threadsafe(started.set_exception, error)
            return
        loop.call_soon_threadsafe(started.set_result, process)
        process.wait()

    threading.Thread(target=run, name="quire-server-process", daemon=True).start()
    return ServerProcess(await started, address, _STOP_S)


class TokenRates:
    """Rates of the tokens of one server, from samples of its counters."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Mapping[str, float]]] = deque()

    def add(self, now_s: float, totals: Mapping[str, float]) -> None:
        """Take in a sample; what is not needed any more is forgotten."""
        samples = self._samples
        samples.append((now_s, totals))
        while len(samples) > 2 and samples[1][0] <= now_s - _MEAN_S:
            samples.popleft()

    def figures(self) -> dict[str, float]:
        """Return the figures that AutoscalePolicy reads: means of about 45 s, refused requests included."""
        samples = self._samples
        newest_s, newest = samples[-1]
        ended = self._rate(samples[0], _NUM_ENDED)
        refused_factor = 1 + self._rate(samples[0], _NUM_REFUSED) / ended if ended > 0 else 1.0
        growth = self._rate(samples[0], _NUM_QUEUED)
        prompts = max(self._rate(samples[0], _NUM_PROMPT_TOKENS) + growth, 0.0)
        recent = next((one for one in reversed(samples) if one[0] <= newest_s - _RECENT_S), samples[0])
        recent_prompts = self._rate(recent, _NUM_PROMPT_TOKENS) + self._rate(recent, _NUM_QUEUED)
        return {
            PROMPT_TOKENS: prompts * refused_factor,
            OUTPUT_TOKENS: self._rate(samples[0], _NUM_OUTPUT_TOKENS) * refused_factor,
            QUEUED_TOKENS: newest.get(_NUM_QUEUED, 0.0),
            RECENT_SHARE: max(recent_prompts, 0.0) / prompts if prompts > 0 else 1.0,
        }

    def _rate(self, since: tuple[float, Mapping[str, float]], name: str) -> float:
        newest_s, newest = self._samples[-1]
        seconds = newest_s - since[0]
        return (newest.get(name, 0.0) - since[1].get(name, 0.0)) / seconds if seconds > 0 else 0.0


def read_totals(text: str, names: Sequence[str]) -> dict[str, float]:
    """Return the sums over all labels of some metrics in Prometheus' text format."""
    totals = dict.fromkeys(names, 0.0)
    for line in text.splitlines():
        name = line.partition(" ")[0].partition("{")[0]
        if name in totals:
            totals[name] += float(line.rpartition(" ")[2])
    return totals
