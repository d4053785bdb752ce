"""EngineFleet: the replicas of one server, with the interface of EngineClient. open_engine returns one of the two."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence

import msgspec

from quire.base.errors import ConfigError, ModelFormatError, QuireError, UnsupportedError, WorkerError
from quire.base.logging import get_logger
from quire.contracts.config import EngineConfig
from quire.contracts.request import Request
from quire.contracts.sleep import SleepLevel
from quire.engine.replica_router import ReplicaRouter
from quire.engine.replica_setup import ReplicaSetup, replica_setups
from quire.serving.engine_client.client import EngineClient
from quire.serving.engine_client.messages import EngineInfo, KvReport, StepOutputs
from quire.serving.engine_client.ray_engines import RayLauncher
from quire.serving.engine_client.subscription import Subscription
from quire.serving.engine_client.supervisor import EngineState, LinkOptions
from quire.serving.errors import ApiError, engine_unavailable

logger = get_logger(__name__)

_KINDS = (ConfigError, ModelFormatError, UnsupportedError)
_UNAVAILABLE_STATUS = 503


class EngineFleet:
    """Starts an engine for each replica and sends each request to the one with the least predicted wait.

    Each replica has its own supervisor. When a replica ends, its requests fail and it is restarted, while the others continue.
    Listeners are called as those of EngineClient: on_step with the replica in the message, on_state with the state of the
    fleet whenever the state of a replica changes.
    """

    def __init__(
        self,
        setups: Sequence[ReplicaSetup],
        options: LinkOptions | None = None,
        make_client: Callable[[EngineConfig, LinkOptions], EngineClient] = EngineClient,
    ) -> None:
        options = LinkOptions() if options is None else options
        self._replicas = tuple(
            make_client(
                setup.config,
                dataclasses.replace(
                    options,
                    environment={**options.environment, **setup.environment},
                    name=f"replica {index}",
                    kv_events=None if options.kv_events is None else options.kv_events.of_replica(index),
                ),
            )
            for index, setup in enumerate(setups)
        )
        self._router = ReplicaRouter([float(setup.config.num_threads or 1) for setup in setups])
        self._is_open = [False] * len(setups)
        self._is_closed = False
        self.on_step: list[Callable[[StepOutputs], None]] = []
        self.on_kv: list[Callable[[KvReport], None]] = []
        self.on_state: list[Callable[[EngineState], None]] = []
        for index, replica in enumerate(self._replicas):
            self._listen(index, replica)

    def _listen(self, index: int, replica: EngineClient) -> None:
        replica.on_step.append(lambda outputs: self._on_step(index, outputs))
        replica.on_kv.append(lambda report: self._notify(self.on_kv, report))
        replica.on_state.append(lambda state: self._on_state(index, state))
        replica.on_end.append(lambda request_id, is_complete: self._router.end(request_id, is_complete=is_complete))

    @property
    def replicas(self) -> tuple[EngineClient, ...]:
        """The clients of the engines, in their order."""
        return self._replicas

    @property
    def state(self) -> EngineState:
        """Ready while any replica is; otherwise the state of the replica that is closest to ready."""
        if self._is_closed:
            return "closed"
        states = {replica.state for replica in self._replicas}
        order: tuple[EngineState, ...] = ("ready", "sleeping", "restarting", "starting", "failed")
        return next((state for state in order if state in states), "closed")

    @property
    def last_error(self) -> str | None:
        """The full reasons why replicas last ended: of those that are not ready, or of all if all are ready."""
        errors = [(index, one.state, one.last_error) for index, one in enumerate(self._replicas) if one.last_error is not None]
        shown = [error for error in errors if error[1] != "ready"] or errors
        return "; ".join(f"replica {index}: {error}" for index, _, error in shown) or None

    @property
    def pid(self) -> int | None:
        """The process id of the first running replica."""
        return next((replica.pid for replica in self._replicas if replica.pid is not None), None)

    @property
    def num_restarts(self) -> int:
        """How often replicas were started again."""
        return sum(replica.num_restarts for replica in self._replicas)

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last message of a ready replica; infinite without one."""
        return min((one.heartbeat_age_s for one in self._replicas if one.state == "ready"), default=math.inf)

    @property
    def num_unfinished(self) -> int:
        """Requests whose last delta has not come."""
        return sum(replica.num_unfinished for replica in self._replicas)

    @property
    def info(self) -> EngineInfo | None:
        """The description of one engine, with the sequences and blocks of all replicas that are ready, or last were."""
        known = [one for one in self._replicas if one.info is not None]
        infos = [one.info for one in known if one.state == "ready" and one.info is not None]
        infos = infos or [one.info for one in known if one.info is not None]
        if not infos:
            return None
        return msgspec.structs.replace(
            infos[0],
            max_num_seqs=sum(info.max_num_seqs for info in infos),
            num_kv_blocks=sum(info.num_kv_blocks for info in infos),
        )

    def has_work(self) -> bool:
        """Return whether a request is unfinished."""
        return any(replica.has_work() for replica in self._replicas)

    async def start(self) -> None:
        """Start all replicas and wait until all are ready. Call once; close afterwards in any case.

        Raises the error of the first replica that cannot start, with its number.
        """
        starts = {asyncio.create_task(replica.start()): index for index, replica in enumerate(self._replicas)}
        try:
            done, _ = await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                error = task.exception()
                if error is not None:
                    raise self._named(starts[task], error) from error
        finally:
            for task in starts:
                task.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    async def close(self) -> None:
        """End all requests and the engines' processes. May be called again."""
        self._is_closed = True
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    def submit(self, request: Request) -> Subscription:
        """Send a request to the replica with the least predicted wait; its id must differ from those of all unfinished ones.

        Raises ApiError: 503 while no replica is ready, 400 for what cannot be sent.
        """
        candidates = [index for index, replica in enumerate(self._replicas) if replica.state == "ready"]
        refusal: ApiError | None = None
        while candidates:
            route = self._router.choose(request, candidates)
            try:
                subscription = self._replicas[route.replica].submit(request)
            except ApiError as error:
                if error.status != _UNAVAILABLE_STATUS:
                    raise
                refusal = error
                candidates.remove(route.replica)
                continue
            self._router.add(request, route)
            return subscription
        raise refusal or engine_unavailable("no replica is ready")

    async def check_sleep(self, level: SleepLevel) -> None:
        """Raise ApiError if one of the replicas cannot sleep at a level; requests go on."""
        self._check_all_loaded()
        for replica in self._replicas:
            await replica.check_sleep(level)

    async def sleep(self, level: SleepLevel) -> None:
        """Put all replicas to sleep, see EngineClient. If one fails, the others are woken up, and its error is raised."""
        self._check_all_loaded()
        ends = await asyncio.gather(*(replica.sleep(level) for replica in self._replicas), return_exceptions=True)
        error = next((end for end in ends if isinstance(end, BaseException)), None)
        if error is not None:
            asleep = [replica for replica in self._replicas if replica.state == "sleeping"]
            await asyncio.gather(*(replica.wake_up() for replica in asleep), return_exceptions=True)
            raise error

    async def wake_up(self) -> None:
        """Wake all replicas up, see EngineClient. Raises the error of the first that fails; the others are awake then."""
        self._check_all_loaded()
        ends = await asyncio.gather(*(replica.wake_up() for replica in self._replicas), return_exceptions=True)
        error = next((end for end in ends if isinstance(end, BaseException)), None)
        if error is not None:
            raise error

    def _check_all_loaded(self) -> None:
        for index, replica in enumerate(self._replicas):
            if replica.state not in ("ready", "sleeping"):
                raise engine_unavailable(f"replica {index} is {replica.state}: all replicas sleep and wake up together")

    def abort(self, request_id: str) -> None:
        """Abort a request; ignored if it has ended."""
        owner = self.replica_of(request_id)
        if owner is not None:
            self._replicas[owner].abort(request_id)

    def replica_of(self, request_id: str) -> int | None:
        """Return the index of the replica that runs a request; None if it has ended or was never submitted."""
        return self._router.owner_of(request_id)

    def watch(self, hz: float) -> None:
        """Request KvReports from all replicas at this maximum rate per second; 0 for none."""
        for replica in self._replicas:
            replica.watch(hz)

    def _on_step(self, index: int, outputs: StepOutputs) -> None:
        if outputs.report is not None:
            for part in outputs.report.parts:
                if part.is_prefill:
                    self._router.note_prefill(part.request_id, part.num_tokens)
        for delta in outputs.deltas:
            self._router.note_output(delta.request_id, sum([len(choice.token_ids) for choice in delta.choices]))
        self._notify(self.on_step, msgspec.structs.replace(outputs, replica=index) if index else outputs)

    def _on_state(self, index: int, state: EngineState) -> None:
        info = self._replicas[index].info
        if state == "ready" and info is not None:
            self._router.open(
                index,
                max_num_seqs=info.max_num_seqs,
                block_size=info.block_size,
                num_kv_blocks=info.num_kv_blocks if info.enable_prefix_caching else 0,
            )
            self._is_open[index] = True
        elif self._is_open[index]:
            self._router.close(index)
            self._is_open[index] = False
        self._notify(self.on_state, self.state)

    def _notify(self, listeners: list[Callable[..., None]], item: object) -> None:
        for listener in listeners:
            try:
                listener(item)
            except Exception:
                logger.exception("a listener of the replicas failed")

    def _named(self, index: int, error: BaseException) -> BaseException:
        text = f"replica {index} of {len(self._replicas)}: {error}"
        if not isinstance(error, QuireError):
            return error
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), WorkerError)
        return kind(text)


def open_engine(config: EngineConfig, options: LinkOptions) -> EngineClient | EngineFleet:
    """Return a client for one engine, or for several replicas, as configured. Raises ConfigError and UnsupportedError."""
    if config.data_parallel_backend == "ray":
        if options.kv_events is not None:
            raise ConfigError(
                f"kv_events_endpoint is {options.kv_events.endpoint!r}, but data_parallel_backend 'ray': nobody knows on which "
                "nodes the engines are; start a server for each, behind `quire router`"
            )
        launcher = RayLauncher.connect(shows_log=options.log_format == "text")
        options, setups = dataclasses.replace(options, launcher=launcher), launcher.setups(config)
    else:
        setups = replica_setups(config)
    return EngineClient(setups[0].config, options) if len(setups) == 1 else EngineFleet(setups, options)
