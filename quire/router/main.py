"""route: the router as a process, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable

import uvicorn
import uvloop

from quire.base.logging import get_logger
from quire.router.admin import AdminApi
from quire.router.app import RouterApp, RouterParts, RouterState
from quire.router.backend import BackendTable
from quire.router.config import RouterConfig
from quire.router.health import HealthMonitor
from quire.router.metrics import RouterMetrics
from quire.router.owners import ObjectOwners
from quire.router.page import RouterPage
from quire.router.policy import make_policy
from quire.router.prompt_tokens import PromptTokens
from quire.router.proxy import Proxy
from quire.serving.config import ServerConfig
from quire.serving.hosts import LOOPBACK, is_loopback
from quire.serving.http.lifecycle import SignalFreeServer, StopRequest, end_serving, listen
from quire.serving.http.protocol import KEEP_ALIVE_S, guarded_protocol

logger = get_logger(__name__)

MakeApp = Callable[[RouterParts, HealthMonitor], RouterApp]
"""Makes the application of a router from its parts."""


class Router:
    """The parts of a router put together; `run` serves until `stop` is called."""

    def __init__(
        self, config: RouterConfig, sock: socket.socket, make_app: MakeApp = lambda parts, monitor: RouterApp(parts)
    ) -> None:
        self._config = config
        self._sock = sock
        self.table = BackendTable(config)
        self.monitor = HealthMonitor(config, self.table)
        metrics, owners = RouterMetrics(self.table), ObjectOwners(self.table)
        choose = make_policy(config.policy, self.table.mean_cost)
        proxy = Proxy(config, self.table, choose, metrics, owners)
        self._state = RouterState()
        admin = AdminApi(self.table, self.monitor)
        tokens, page = PromptTokens(config, metrics), RouterPage(is_enabled=config.enable_page)
        parts = RouterParts(config, self.table, proxy, owners, metrics, admin, self._state, tokens, page)
        self.app = make_app(parts, self.monitor)
        self._stop = StopRequest()

    def stop(self) -> None:
        """Begin to drain; called again, stop at once."""
        self._stop.stop()

    async def run(self) -> None:
        """Serve until `stop` is called, then let what runs end."""
        limits = ServerConfig(host=self._config.host, port=self._config.port)
        server = SignalFreeServer(
            uvicorn.Config(
                self.app,
                http=guarded_protocol(limits),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                access_log=False,
                proxy_headers=False,
                log_config=None,
                timeout_keep_alive=KEEP_ALIVE_S,
                server_header=False,
                date_header=False,  # answers have that of their backend
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[self._sock]))
        self.monitor.start()
        self._announce()
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await self._drain(server, serving)
        await self.monitor.close()
        for backend in self.table:
            backend.upstream.close()
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)

    async def _drain(self, server: SignalFreeServer, serving: asyncio.Task[None]) -> None:
        self._state.is_draining = True
        logger.info("draining: what runs may take %.0f s", self._config.drain_timeout_s)
        server.should_exit = True  # closes the listening socket; what is open goes on
        await self._stop.unless_hurried(self._state.drained(self._config.drain_timeout_s))
        await end_serving(server, serving, 0.0)

    def _announce(self) -> None:
        host, port = self._sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        logger.info("listening on http://%s:%d, policy %s", shown, port, self._config.policy)
        if not is_loopback(self._config.host) and not self._config.adds_backends:
            logger.warning("anyone who reaches %s reaches the backends: give them API keys", self._config.host)


def allowed_hosts(config: RouterConfig) -> tuple[str, ...] | None:
    """Return the Host names that are answered; None for all."""
    if config.allowed_hosts is not None:
        return (*config.allowed_hosts, config.host)
    return (*LOOPBACK, config.host) if is_loopback(config.host) else None


def route(config: RouterConfig) -> int:
    """Run a router until a signal ends it; return its exit status. Raises ConfigError."""
    # Its only messages are about answers that were broken off, which the router logs by itself.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    sock = listen(ServerConfig(host=config.host, port=config.port))

    async def run() -> int:
        router = Router(config, sock)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, router.stop)
        await router.run()
        return 0

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run())
    finally:
        sock.close()
