"""The life cycle of the server process: the socket, the engine, signals, the drain, the exit status."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from quire.base.errors import ConfigError, QuireError
from quire.base.gc_policy import collect_seldom
from quire.base.logging import get_logger
from quire.serving.config import ServerConfig
from quire.serving.context import ServerContext, ServerState
from quire.serving.engine_client.client import EngineClient
from quire.serving.engine_client.fleet import EngineFleet
from quire.serving.hosts import is_loopback
from quire.serving.http.protocol import KEEP_ALIVE_S, guarded_protocol
from quire.serving.metrics.server_metrics import ServerMetrics
from quire.serving.request_queue import EngineGateway

logger = get_logger(__name__)

SEND_BUFFER_BYTES = 64 << 10  # the kernel's send buffer for a client that does not read
BACKLOG = 2048
# TCP keep-alive: a connection is closed after 40 s without a packet, or 20 s without an acknowledgement of sent data.
PEER_OPTIONS = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20_000))
LAST_WORDS_S = 2.0  # time for errors to reach their clients after the drain


class SignalFreeServer(uvicorn.Server):
    """uvicorn without its signal handlers: who runs it handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class StopRequest:
    """Whether a process is to end: first it drains; who asks again does not want to wait."""

    def __init__(self) -> None:
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()

    def begin(self) -> None:
        """Ask for the end, as often as there are reasons."""
        self._stopping.set()

    def stop(self) -> None:
        """Ask for the end; the second time, to hurry."""
        if self._stopping.is_set():
            logger.warning("stopping at once")
            self._hurrying.set()
        self._stopping.set()

    async def wait(self) -> None:
        """Return when the end was asked for."""
        await self._stopping.wait()

    async def unless_hurried(self, work: Coroutine[Any, Any, object]) -> None:
        """Return when some work of the drain has ended, or was cancelled because the end was asked for again."""
        task = asyncio.ensure_future(work)
        hurry = asyncio.create_task(self._hurrying.wait())
        await asyncio.wait({task, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for part in (task, hurry):
            part.cancel()
        await asyncio.gather(task, hurry, return_exceptions=True)


async def end_serving(server: SignalFreeServer, serving: asyncio.Task[None], last_words_s: float) -> None:
    """End a server that takes no more connections: open answers have some seconds, then all connections are closed."""
    await asyncio.wait({serving}, timeout=last_words_s)
    server.force_exit = True
    await asyncio.wait({serving}, timeout=LAST_WORDS_S)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


def check_tls(config: ServerConfig) -> None:
    """Read the key and the certificate. Raises ConfigError where they cannot be used."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"ssl_keyfile {config.ssl_keyfile} and ssl_certfile {config.ssl_certfile} cannot be used: {error}; give a private "
            "key without a password and its certificate, both as PEM"
        ) from None


def _listen_at_path(path: Path) -> socket.socket:
    """Return a listening Unix socket, whose file replaces one that nobody listens on. Raises ConfigError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise ConfigError(f"uds: another server listens on {path}; end it, or give another path")
            path.unlink()
        sock.bind(str(path))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"uds: cannot listen on {path}: {error.strerror or error}; give another path") from None
    except ConfigError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def listen(config: ServerConfig) -> socket.socket:
    """Return the listening socket. Raises ConfigError when the address cannot be had."""
    if config.uds is not None:
        return _listen_at_path(config.uds)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by every connection.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in PEER_OPTIONS:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        sock.bind((config.host, config.port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}; give another --host or --port"
        ) from None
    sock.setblocking(False)
    return sock


@dataclass(frozen=True, slots=True)
class LifecycleParts:
    """The objects that start and end with a server."""

    config: ServerConfig
    context: ServerContext
    client: EngineClient | EngineFleet
    gateway: EngineGateway
    metrics: ServerMetrics


@dataclass(slots=True)
class Lifecycle:
    """Runs one server from its start to its exit status.

    on_loaded     called when the engine is ready for the first time, before requests are taken
    close_stores  closes what on_loaded has opened
    """

    parts: LifecycleParts
    app: ASGIApp
    sock: socket.socket
    on_loaded: Callable[[], Awaitable[object]]
    close_stores: Callable[[], Awaitable[None]]
    _server: SignalFreeServer | None = None
    _stop: StopRequest = field(default_factory=StopRequest)
    _is_interrupted: bool = False

    @property
    def _state(self) -> ServerState:
        return self.parts.context.state

    async def run(self) -> int:
        """Serve until a signal or a failed engine ends it; return 0 after a drain, 1 after a failure."""
        config = self.parts.config
        self._server = SignalFreeServer(
            uvicorn.Config(
                self.app,
                http=guarded_protocol(config, self.parts.metrics.rejected),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                access_log=False,
                proxy_headers=False,  # client addresses are not used
                log_config=None,
                timeout_keep_alive=KEEP_ALIVE_S,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                server_header=False,
            )
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        self.parts.client.on_state.append(self._on_engine_state)
        serving = asyncio.create_task(self._server.serve(sockets=[self.sock]))
        starting = asyncio.create_task(self._start_engine())
        lag = asyncio.create_task(watch_loop(self.parts.metrics.loop_lag, self.parts.client.has_work))
        self._announce()
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        starting.cancel()
        lag.cancel()
        await self._drain(serving)
        await asyncio.gather(starting, lag, stopping, return_exceptions=True)
        return 1 if self._state.failure is not None else 0

    def _announce(self) -> None:
        if self.parts.config.uds is not None:
            logger.info("listening on the Unix socket %s", self.parts.config.uds)
            return
        host, port = self.sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if self.parts.config.ssl_certfile is None else "https"
        logger.info("listening on %s://%s:%d", scheme, shown, port)
        if not self.parts.config.api_keys and not is_loopback(self.parts.config.host):
            logger.warning(
                "anyone who reaches %s can use this server: give --api-key, or --host 127.0.0.1", self.parts.config.host
            )

    async def _start_engine(self) -> None:
        try:
            await self.parts.client.start()
            await self.on_loaded()
        except QuireError as error:
            self._fail(str(error))
        except Exception as error:
            logger.exception("the server could not start")
            self._fail(f"{type(error).__name__}: {error}")
        else:
            # The objects so far are permanent: exclude them from garbage collection.
            gc.collect()
            gc.freeze()
            collect_seldom()
            if self._state.phase == "starting":
                self._state.phase = "serving"
            logger.info("ready: %s", ", ".join(self.parts.context.model.names))

    def _fail(self, reason: str) -> None:
        logger.error("the server ends: %s", reason)
        self._state.failure = reason
        self._state.phase = "failed"
        self._stop.begin()

    def _on_engine_state(self, state: str) -> None:
        if state == "failed" and self._state.phase in ("serving", "draining"):
            self._fail(self.parts.client.last_error or "the engine has failed")

    def _on_signal(self, number: int) -> None:
        self._is_interrupted = number == signal.SIGINT
        self._stop.stop()

    async def _drain(self, serving: asyncio.Task[None]) -> None:
        """Refuse new work, let running requests end, fail the remaining ones, and stop."""
        gateway, state, config = self.parts.gateway, self._state, self.parts.config
        if state.phase != "failed":
            state.phase = "draining"
            logger.info("draining: what runs may take %.0f s", config.drain_timeout_s)
        gateway.start_drain(config.drain_grace_s + config.drain_timeout_s)
        if state.phase == "draining" and not self._is_interrupted:
            await self._stop.unless_hurried(asyncio.sleep(config.drain_grace_s))
        if self._server is not None:
            self._server.should_exit = True  # closes the listening socket; open connections continue
        if state.phase == "draining":
            await self._stop.unless_hurried(gateway.drained(config.drain_timeout_s))
        gateway.fail_all()
        await self.close_stores()
        if self._server is not None:
            await end_serving(self._server, serving, LAST_WORDS_S)
        served = self.parts.context.served
        if served is not None:
            served.preparation.close()
        await self.parts.client.close()


IDLE_PERIOD_S = 0.25
BUSY_PERIOD_S = 0.02


async def watch_loop(report: Callable[[float], None], is_busy: Callable[[], bool] = lambda: False) -> None:
    """Report again and again, until cancelled, how many seconds later than asked for a timer of the running loop went off.

    is_busy  whether there is work that makes it worth looking more often
    """
    loop = asyncio.get_running_loop()
    while True:
        period_s = BUSY_PERIOD_S if is_busy() else IDLE_PERIOD_S
        due_s = loop.time() + period_s
        await asyncio.sleep(period_s)
        report(max(loop.time() - due_s, 0.0))
