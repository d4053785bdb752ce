"""serve_fleet: a server with several models as a process, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal

import uvloop

from quire.base.logging import get_logger
from quire.contracts.memory import format_bytes
from quire.fleet.app import FleetApp, FleetParts, RouterBackends
from quire.fleet.config import FleetConfig
from quire.fleet.manager import FleetManager
from quire.fleet.metrics import FleetMetrics
from quire.fleet.process import ServerLauncher
from quire.router.app import RouterParts
from quire.router.config import RouterConfig
from quire.router.health import HealthMonitor
from quire.router.main import Router
from quire.serving.config import ServerConfig
from quire.serving.hosts import is_loopback
from quire.serving.http.lifecycle import listen

logger = get_logger(__name__)

_KEY_BYTES = 32


def router_config(config: FleetConfig, router_key: str | None) -> RouterConfig:
    """Return the configuration of the router. A model has one process, so there is nothing to choose or to retry."""
    return RouterConfig(
        host=config.host,
        port=config.port,
        aliases=config.aliases,
        backend_key=router_key,
        policy="least-loaded",
        max_body_bytes=config.max_body_bytes,
        max_held_body_bytes=config.max_held_body_bytes,
        max_retries=0,
        max_resumes=0,
        drain_timeout_s=config.drain_timeout_s,
        adds_backends=True,
    )


def serve_fleet(config: FleetConfig) -> int:
    """Serve until a signal ends it; return the exit status. Raises ConfigError."""
    # Its only messages are about answers that were broken off, which the router logs by itself.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    router_key = secrets.token_urlsafe(_KEY_BYTES)
    sock = listen(ServerConfig(host=config.host, port=config.port))
    if not config.api_keys and not is_loopback(config.host):
        logger.warning("anyone who reaches %s can use the server: give it API keys", config.host)

    async def run(launcher: ServerLauncher) -> int:
        metrics = FleetMetrics()
        made: list[FleetManager] = []

        def make_app(parts: RouterParts, monitor: HealthMonitor) -> FleetApp:
            manager = FleetManager(config, launcher.launch, RouterBackends(parts.table, monitor), metrics)
            made.append(manager)
            return FleetApp(parts, FleetParts(config, manager, metrics))

        router = Router(router_config(config, router_key if config.api_keys else None), sock, make_app)
        (manager,) = made
        signals: list[int] = []

        def stop(number: int) -> None:
            signals.append(number)
            router.stop()
            if len(signals) > 1:  # whoever asks again does not want to wait
                launcher.kill()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        logger.info("%d models, %s of memory for them", len(config.models), format_bytes(config.memory_bytes))
        manager.start()
        await router.run()
        await manager.close()
        return 0

    try:
        with ServerLauncher(config, router_key) as launcher, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run(launcher))
    finally:
        sock.close()
