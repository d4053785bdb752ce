"""serve: the parts of the server put together."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from quire.base.errors import InvariantError
from quire.base.logging import get_logger
from quire.contracts.config import EngineConfig
from quire.serving.admission import AdmissionControl
from quire.serving.anthropic.endpoints import ENDPOINTS as ANTHROPIC_ENDPOINTS
from quire.serving.batch import endpoints as batch_endpoints
from quire.serving.batch.execution import BATCH_ENDPOINTS, check_batch_body, make_execute
from quire.serving.batch.service import BatchService
from quire.serving.batch.store import BatchStore
from quire.serving.config import ServerConfig
from quire.serving.context import ServerContext
from quire.serving.core.served_model import load_served_model
from quire.serving.endpoint import Endpoint
from quire.serving.engine_client.client import EngineClient
from quire.serving.engine_client.supervisor import LinkOptions
from quire.serving.http.app import make_app
from quire.serving.http.auth import Authenticator
from quire.serving.http.lifecycle import Lifecycle, bind
from quire.serving.http.system import make_endpoints
from quire.serving.metrics.log_format import log_ended, setup_log_format
from quire.serving.metrics.server_metrics import ServerMetrics
from quire.serving.metrics.tracing import RequestTracing
from quire.serving.openai.endpoints import ENDPOINTS as OPENAI_ENDPOINTS
from quire.serving.page.endpoints import page_endpoints
from quire.serving.page.feed import EngineFeed
from quire.serving.page.view import EngineView
from quire.serving.request_queue import EngineGateway
from quire.serving.responses.endpoints import ENDPOINTS as RESPONSES_ENDPOINTS
from quire.serving.responses.store import ResponseStore, ResponseTable

logger = get_logger(__name__)

SWITCH_INTERVAL_S = 0.001  # after which a thread that prepares a prompt gives way to the event loop


@dataclass(slots=True)
class Server:
    """The context of a server and what belongs to it, before it runs."""

    name: str
    context: ServerContext
    gateway: EngineGateway

    @classmethod
    def of(cls, config: ServerConfig, engine_config: EngineConfig) -> Server:
        """Put the parts together; nothing is started."""
        client = EngineClient(engine_config, LinkOptions.of(config))
        name = config.served_model_names[0] if config.served_model_names else engine_config.model
        metrics = ServerMetrics(
            config, name, heartbeat_age_s=lambda: client.heartbeat_age_s, num_restarts=lambda: client.num_restarts
        )
        admission = AdmissionControl(config, clock=time.monotonic, random=random.random)
        gateway = EngineGateway(client, admission, metrics)
        context = ServerContext(
            config=config, gateway=gateway, client=client, authenticator=Authenticator(config), metrics=metrics
        )
        return cls(name, context, gateway)

    async def load_model(self) -> None:
        """Load what this process needs of the engine's model. Raises ConfigError and ModelFormatError."""
        info = self.context.client.info
        if info is None:
            raise InvariantError("the engine is ready and has not said what it serves")
        served = await asyncio.to_thread(load_served_model, info, self.context.config)
        self.context.served = replace(served, count_tool_output=self.context.metrics.tool_parser)

    async def on_loaded(self) -> None:
        """Make what depends on the loaded model. Raises ConfigError and ModelFormatError."""
        await self.load_model()
        context = self.context
        context.batches = BatchService(
            context.config.data_dir,
            make_execute(context),
            check_batch_body,
            BATCH_ENDPOINTS,
            lambda: self.gateway.batch_window,
            context.metrics.batch_lines,
            context.config.max_batches_of,
        )
        await context.batches.start()
        config = context.config
        context.responses = await asyncio.to_thread(
            ResponseStore, config.data_dir, limit_of=lambda owner: config.stored_limits(owner)[1]
        )
        if context.config.data_dir is None:
            logger.info("files, batches and responses are kept in memory: --data-dir keeps them over a restart")

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Return every route."""
        found = (*OPENAI_ENDPOINTS, *RESPONSES_ENDPOINTS, *ANTHROPIC_ENDPOINTS, *batch_endpoints.ENDPOINTS)
        found = (*found, *make_endpoints(found, self.context.config.enable_metrics))
        return (*found, *self._page_endpoints()) if self.context.config.enable_page else found

    def _page_endpoints(self) -> tuple[Endpoint, ...]:
        context = self.context
        view = EngineView(context.client, self.gateway, context.metrics, lambda: context.phase)
        return page_endpoints(EngineFeed(context.client, view))


def check_data_dir(folder: Path | None) -> None:
    """Open what is stored in a folder, made where it is missing, and close it again. Raises ConfigError."""
    if folder is not None:
        BatchStore(folder).close()
        ResponseTable(folder, None, lambda owner: 0).close()


def serve(config: ServerConfig, engine_config: EngineConfig, log_level: str) -> int:
    """Run a server until a signal or a failure ends it; return its exit status. Raises ConfigError."""
    setup_log_format(config.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    check_data_dir(config.data_dir)
    sock = bind(config)

    async def run() -> int:
        server = Server.of(config, engine_config)
        on_end = server.context.metrics.on_end
        on_end.append(log_ended)
        tracing = None if config.otlp_endpoint is None else RequestTracing(config.otlp_endpoint, server.name)
        if tracing is not None:
            on_end.append(tracing.record_ended)
        app = make_app(server.context, server.endpoints())
        try:
            return await Lifecycle(server.context, app, sock, server.on_loaded).run()
        finally:
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            # The runner's own handler of Ctrl-C would cancel the drain.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return runner.run(run())
    finally:
        sock.close()
