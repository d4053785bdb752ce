"""serve: assembles the parts of the server and runs it."""

from __future__ import annotations

import asyncio
import functools
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
from quire.contracts.expert_stats import ExpertStats
from quire.contracts.rank_stats import RankStats
from quire.contracts.tier_stats import TierStats
from quire.serving.admission import AdmissionControl
from quire.serving.anthropic.endpoints import ENDPOINTS as ANTHROPIC_ENDPOINTS
from quire.serving.auth import Authenticator, cache_secret
from quire.serving.batch.endpoints import ENDPOINTS as BATCH_API_ENDPOINTS
from quire.serving.batch.endpoints import BatchRoutes
from quire.serving.batch.execution import BATCH_ENDPOINTS, check_batch_body, make_execute
from quire.serving.batch.message_batches import ENDPOINTS as MESSAGE_BATCH_ENDPOINTS
from quire.serving.batch.runner import Execute
from quire.serving.batch.service import BatchService
from quire.serving.batch.store import BatchStore
from quire.serving.body_room import BodyRoom
from quire.serving.config import ServerConfig
from quire.serving.context import ServerContext
from quire.serving.core.served_model import load_served_model
from quire.serving.endpoint import Endpoint, Route, bind
from quire.serving.engine_client.client import EngineClient
from quire.serving.engine_client.fleet import EngineFleet, open_engine
from quire.serving.engine_client.supervisor import LinkOptions
from quire.serving.http.app import ShellParts, make_app
from quire.serving.http.lifecycle import Lifecycle, LifecycleParts, check_tls, listen
from quire.serving.http.sleep import ENDPOINTS as SLEEP_ENDPOINTS
from quire.serving.http.sleep import SleepParts
from quire.serving.http.system import SystemParts, make_endpoints
from quire.serving.http.timelines import ENDPOINTS as TIMELINE_ENDPOINTS
from quire.serving.http.timelines import TimelineParts
from quire.serving.log_format import setup_log_format
from quire.serving.metrics.engine_metrics import EngineSource
from quire.serving.metrics.expert_metrics import ExpertMetrics
from quire.serving.metrics.rank_metrics import RankMetrics
from quire.serving.metrics.request_record import log_ended
from quire.serving.metrics.server_metrics import ServerMetrics
from quire.serving.metrics.tier_metrics import TierMetrics
from quire.serving.metrics.timelines import TimelineStore
from quire.serving.metrics.tracing import RequestTracing
from quire.serving.ollama.endpoints import ENDPOINTS as OLLAMA_ENDPOINTS
from quire.serving.openai.endpoints import ENDPOINTS as OPENAI_ENDPOINTS
from quire.serving.openai.lora import ENDPOINTS as LORA_ENDPOINTS
from quire.serving.openai.lora import LoraRoutes
from quire.serving.page.endpoints import page_endpoints
from quire.serving.page.feed import EngineFeed
from quire.serving.page.view import EngineView
from quire.serving.request_queue import EngineGateway
from quire.serving.responses.create import ResponseRoutes
from quire.serving.responses.endpoints import ENDPOINTS as RESPONSES_ENDPOINTS
from quire.serving.responses.store import ResponseStore, ResponseTable

logger = get_logger(__name__)

SWITCH_INTERVAL_S = 0.001  # after this time a thread that prepares a prompt must yield the GIL to the event loop


@dataclass(slots=True, kw_only=True)
class Server:
    """The parts of a server before it runs; `on_loaded` makes those that need the model."""

    name: str
    config: ServerConfig
    client: EngineClient | EngineFleet
    gateway: EngineGateway
    authenticator: Authenticator
    metrics: ServerMetrics
    bodies: BodyRoom
    context: ServerContext
    responses: ResponseRoutes
    batches: BatchRoutes
    lora: LoraRoutes
    timelines: TimelineStore | None

    @classmethod
    def of(cls, config: ServerConfig, engine_config: EngineConfig, log_level: str = "INFO") -> Server:
        """Put the parts together; nothing is started. log_level: of the engine's process."""
        secret = cache_secret(config, engine_config.kv_disk_dir)
        client = open_engine(engine_config, LinkOptions.of(config, log_level))
        name = config.served_model_names[0] if config.served_model_names else engine_config.model
        metrics = ServerMetrics(config, name, engines=[_source_of(replica) for replica in client.replicas])
        for index, replica in enumerate(client.replicas):
            labels = (str(index),) if len(client.replicas) > 1 else ()
            ranks = RankMetrics(metrics.defined, functools.partial(_ranks_of, replica), labels)
            tiers = TierMetrics(metrics.defined, functools.partial(_tiers_of, replica), labels)
            experts = ExpertMetrics(metrics.defined, functools.partial(_experts_of, replica), labels)
            metrics.on_collect += [ranks.write, tiers.write, experts.write]
        timelines = TimelineStore(config.max_timelines) if config.max_timelines > 0 else None
        if timelines is not None:
            metrics.on_end.append(timelines.keep)
            client.on_step.append(timelines.note_step)
        admission = AdmissionControl(config, clock=time.monotonic, random=random.random)
        gateway = EngineGateway(client, admission, metrics)
        context = ServerContext(config=config, gateway=gateway)
        return cls(
            name=name,
            config=config,
            client=client,
            gateway=gateway,
            authenticator=Authenticator(config, secret),
            metrics=metrics,
            bodies=BodyRoom(config.max_held_body_bytes),
            context=context,
            responses=ResponseRoutes(context),
            batches=BatchRoutes(context),
            lora=LoraRoutes(context, client.replicas),
            timelines=timelines,
        )

    async def load_model(self) -> None:
        """Load the parts of the engine's model that this process needs. Raises ConfigError and ModelFormatError."""
        info = self.client.info
        if info is None:
            raise InvariantError("the engine is ready and has not said what it serves")
        served = await asyncio.to_thread(load_served_model, info, self.config)
        self.context.served = replace(served, count_tool_output=self.metrics.tool_parser)

    def execute(self) -> Execute:
        """Return the function that runs a line of a batch."""
        return make_execute(self.responses, self.authenticator, self.bodies.decoding)

    async def on_loaded(self) -> None:
        """Make the parts that depend on the loaded model. Raises ConfigError and ModelFormatError."""
        await self.load_model()
        config = self.config
        await self.lora.load_modules(config.lora_modules)
        self.batches.opened = BatchService(
            config.data_dir,
            self.execute(),
            check_batch_body,
            BATCH_ENDPOINTS,
            lambda: self.gateway.batch_window,
            self.metrics.batch_lines,
            config.max_batches_of,
            config.replica_id,
        )
        await self.batches.opened.start()
        self.responses.opened = await asyncio.to_thread(
            ResponseStore, config.data_dir, limit_of=lambda owner: config.stored_limits(owner)[1]
        )
        if config.data_dir is None:
            logger.info("files, batches and responses are kept in memory: --data-dir keeps them over a restart")

    async def close_stores(self) -> None:
        """Close what `on_loaded` has opened."""
        await self.responses.background.close()
        for part in (self.batches.opened, self.responses.opened):
            if part is not None:
                await part.close()

    def shell(self) -> ShellParts:
        """Return the objects that the application needs in addition to the routes."""
        return ShellParts(self.config, self.gateway, self.authenticator, self.metrics, self.bodies)

    def routes(self) -> tuple[Route, ...]:
        """Return every route."""
        found = (
            *bind(OPENAI_ENDPOINTS, self.context),
            *bind(RESPONSES_ENDPOINTS, self.responses),
            *bind(ANTHROPIC_ENDPOINTS, self.context),
            *bind(OLLAMA_ENDPOINTS, self.context),
            *bind(BATCH_API_ENDPOINTS, self.batches),
            *bind(MESSAGE_BATCH_ENDPOINTS, self.batches),
            *bind(LORA_ENDPOINTS, self.lora),
            *bind(SLEEP_ENDPOINTS, SleepParts(self.client, self.gateway)),
            *bind(TIMELINE_ENDPOINTS, TimelineParts(self.timelines, self.metrics.records, self.client.replicas)),
        )
        described = make_endpoints(tuple(route.endpoint for route in found), self.config.enable_metrics)
        found += bind(described, SystemParts(self.context, self.client, self.authenticator, self.metrics))
        return (*found, *bind(self._page_endpoints(), self.context)) if self.config.enable_page else found

    def _page_endpoints(self) -> tuple[Endpoint[ServerContext], ...]:
        replicas, state = self.client.replicas, self.context.state

        def states() -> list[str]:
            return [one.state for one in replicas] if len(replicas) > 1 else []

        views = [EngineView(one, self.gateway, self.metrics, lambda: state.phase, replicas=states) for one in replicas]
        return page_endpoints([EngineFeed(one, view) for one, view in zip(replicas, views, strict=True)])


def _ranks_of(client: EngineClient) -> list[RankStats]:
    return client.ranks


def _experts_of(client: EngineClient) -> list[ExpertStats]:
    return client.experts


def _tiers_of(client: EngineClient) -> list[TierStats]:
    return client.tiers


def _source_of(replica: EngineClient) -> EngineSource:
    return EngineSource(
        heartbeat_age_s=lambda: replica.heartbeat_age_s,
        num_restarts=lambda: replica.num_restarts,
        num_unfinished=lambda: replica.num_unfinished,
    )


def check_data_dir(folder: Path | None) -> None:
    """Check that the stores in a folder can be opened; the folder is created if missing. Raises ConfigError."""
    if folder is not None:
        BatchStore(folder).close()
        ResponseTable(folder, None, lambda owner: 0).close()


def serve(config: ServerConfig, engine_config: EngineConfig, log_level: str) -> int:
    """Run a server until a signal or a failure ends it; return its exit status. Raises ConfigError."""
    setup_log_format(config.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    check_data_dir(config.data_dir)
    check_tls(config)
    sock = listen(config)

    async def run() -> int:
        server = Server.of(config, engine_config, log_level)
        on_end = server.metrics.on_end
        on_end.append(log_ended)
        tracing = None if config.otlp_endpoint is None else RequestTracing(config.otlp_endpoint, server.name)
        if tracing is not None:
            on_end.append(tracing.record_ended)
            exporter, metrics = tracing.exporter, server.metrics
            metrics.on_collect.append(lambda: metrics.otlp_exports(exporter.num_sent, exporter.num_dropped))
        app = make_app(server.shell(), server.routes())
        parts = LifecycleParts(config, server.context, server.client, server.gateway, server.metrics)
        try:
            return await Lifecycle(parts, app, sock, server.on_loaded, server.close_stores).run()
        finally:
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            # asyncio.Runner's handler of SIGINT would cancel the drain.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return runner.run(run())
    finally:
        sock.close()
        if config.uds is not None:
            config.uds.unlink(missing_ok=True)
