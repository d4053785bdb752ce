"""FleetManager: which models are loaded. Loads one when a request needs it, and unloads the least recently used for room."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from quire.base.errors import QuireError
from quire.base.logging import get_logger
from quire.contracts.memory import format_bytes
from quire.fleet.config import FleetConfig, ModelEntry
from quire.fleet.metrics import FleetMetrics
from quire.router.backend import backoff_s
from quire.router.config import BackendAddress
from quire.serving.errors import ApiError, spread_s

logger = get_logger(__name__)

State = Literal["unloaded", "loading", "loaded", "unloading"]
STATES: tuple[State, ...] = ("unloaded", "loading", "loaded", "unloading")
UnloadReason = Literal["memory", "idle"]
_TICK_S = 0.25
_FIRST_BACKOFF_S = 1.0
_STABLE_S = 60.0
"""A process that ran for so long before it failed is started again without a longer pause."""
_DEFAULT_LOAD_S = 10.0


class ModelStartError(QuireError):
    """A model's process that did not become ready."""


class ModelProcess(Protocol):
    """The process of one model."""

    @property
    def address(self) -> BackendAddress:
        """Where it listens; the label is the model's name."""
        ...

    async def wait_ready(self) -> None:
        """Return when it takes requests. Raises ModelStartError."""
        ...

    async def wait(self) -> str:
        """Return how it ended."""
        ...

    async def stop(self, *, hurry: bool = False) -> None:
        """Let it drain and end; kill it where that takes too long, or at once with `hurry`. It may have ended already."""
        ...


class Backends(Protocol):
    """The router's side: which models requests can be sent to."""

    async def add(self, address: BackendAddress) -> None:
        """Return when requests can be sent to a process. Raises ModelStartError."""
        ...

    async def remove(self, name: str) -> None:
        """Send no more requests to a model."""
        ...

    def is_busy(self, name: str) -> bool:
        """Return whether its process works, on requests in flight or in the background."""
        ...


@dataclass(slots=True, eq=False)
class Slot:
    """One model and the state of its process. Only FleetManager writes it.

    num_held      requests that use it
    waiters       futures of requests that wait for it
    wanted_s      when the first of them began to wait; None while it is not in the queue for memory
    is_due        it is to be loaded without a request: preload
    is_yielding   it gets no new requests until it has made room for another
    error         why its last process failed; None after a success
    load_s        seconds that its last load took
    """

    entry: ModelEntry
    state: State = "unloaded"
    process: ModelProcess | None = None
    task: asyncio.Task[None] | None = None
    num_held: int = 0
    waiters: list[asyncio.Future[None]] = field(default_factory=list["asyncio.Future[None]"])
    wanted_s: float | None = None
    is_due: bool = False
    is_yielding: bool = False
    last_used_s: float = 0.0
    loaded_s: float = 0.0
    load_s: float | None = None
    error: str | None = None
    num_failures: int = 0
    retry_at_s: float = 0.0

    @property
    def name(self) -> str:
        return self.entry.name


class FleetManager:
    """Used from the event loop only. Models are loaded in the order in which requests asked for them.

    The sum of the memory of all processes, those that start or end included, never exceeds the budget. A model that a request
    uses is never unloaded.
    """

    def __init__(
        self,
        config: FleetConfig,
        launch: Callable[[ModelEntry], ModelProcess],
        backends: Backends,
        metrics: FleetMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """launch: starts the process of a model; may raise OSError and QuireError."""
        self._config = config
        self._launch = launch
        self._backends = backends
        self._metrics = metrics
        self._clock = clock
        self._slots = {entry.name: Slot(entry) for entry in config.models}
        self._wanted: list[Slot] = []
        self.wake = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def slots(self) -> Sequence[Slot]:
        """All models in the order of the configuration."""
        return list(self._slots.values())

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a model."""
        return sum([len(slot.waiters) for slot in self._slots.values()])

    @property
    def used_bytes(self) -> int:
        """Memory of all processes, those that start or end included."""
        return sum([slot.entry.memory_bytes for slot in self._slots.values() if slot.state != "unloaded"])

    @property
    def has_preloaded(self) -> bool:
        """Whether every model with preload has been loaded, or has failed."""
        return not any(slot.is_due for slot in self._slots.values())

    def start(self) -> None:
        """Begin to load what is to be loaded at the start."""
        for slot in self._slots.values():
            if slot.entry.preload or slot.entry.pinned:
                slot.is_due = True
                self._want(slot)
        self._running = asyncio.create_task(self._run())

    async def close(self, *, hurry: bool = False) -> None:
        """Refuse requests that wait, and end all processes."""
        self._is_closed = True
        tasks = [task for task in (self._running, *(slot.task for slot in self._slots.values())) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for slot in self._slots.values():
            self._refuse_waiters(slot, "the server is shutting down")
        ending = [slot.process.stop(hurry=hurry) for slot in self._slots.values() if slot.process is not None]
        await asyncio.gather(*ending)
        for slot in self._slots.values():
            slot.state, slot.process = "unloaded", None

    @contextlib.asynccontextmanager
    async def hold(self, name: str) -> AsyncGenerator[None]:
        """Keep a model loaded inside `async with`; it is loaded before. Raises ApiError 503 where that fails or takes long."""
        slot = self._slots[name]
        if slot.state == "loaded" and not slot.is_yielding:
            slot.num_held += 1
        else:
            await self._wait_loaded(slot)
        try:
            yield
        finally:
            self._release(slot)

    def _release(self, slot: Slot) -> None:
        slot.num_held -= 1
        slot.last_used_s = self._clock()
        self.wake.set()

    async def _wait_loaded(self, slot: Slot) -> None:
        """Return when a model is loaded, and held for the caller. Raises ApiError 503."""
        self._check_may_wait(slot)
        begin_s = self._clock()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        slot.waiters.append(waiter)
        if slot.state != "loading":
            self._want(slot)
        try:
            async with asyncio.timeout(self._config.max_wait_s):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release(slot)  # it was loaded at the moment in which the caller gave up
            if isinstance(error, TimeoutError):
                raise self._refusal(slot, "timeout", f"was not loaded within {self._config.max_wait_s:g} s") from None
            raise
        finally:
            if waiter in slot.waiters:
                slot.waiters.remove(waiter)
                self.wake.set()
        self._metrics.wait_seconds.labels(slot.name).observe(self._clock() - begin_s)

    def _check_may_wait(self, slot: Slot) -> None:
        if self._is_closed:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after_s=_DEFAULT_LOAD_S)
        if slot.state == "unloaded" and self._clock() < slot.retry_at_s:
            raise self._refusal(slot, "failed", f"cannot be loaded: {slot.error}", slot.retry_at_s - self._clock())
        if self.num_waiting >= self._config.max_waiting_requests:
            message = f"is not loaded, and {self.num_waiting} requests wait for models already, which is the limit"
            raise self._refusal(slot, "queue_full", message)

    def _refusal(self, slot: Slot, reason: str, text: str, retry_after_s: float | None = None) -> ApiError:
        self._metrics.refused.labels(slot.name, reason).add()
        wait_s = spread_s(slot.load_s or _DEFAULT_LOAD_S) if retry_after_s is None else retry_after_s
        code = {"timeout": "model_load_timeout", "queue_full": "model_queue_full", "failed": "model_load_failed"}[reason]
        return ApiError(503, f"the model {slot.name!r} {text}", code=code, retry_after_s=wait_s)

    def _want(self, slot: Slot) -> None:
        """Put a model into the queue for memory, unless it is there."""
        if slot not in self._wanted:
            self._wanted.append(slot)
            slot.wanted_s = self._clock()
        self.wake.set()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self.wake.wait()
            self.wake.clear()
            try:
                self._end_unused()
                self._admit()
            except Exception:
                logger.exception("a decision about models failed")

    def _end_unused(self) -> None:
        """Unload models whose keep_alive_s is over."""
        for slot in self._slots.values():
            keep_alive_s = slot.entry.keep_alive_s
            if keep_alive_s is not None and self._is_idle(slot) and self._clock() - slot.last_used_s >= keep_alive_s:
                self._unload(slot, "idle")

    def _is_idle(self, slot: Slot) -> bool:
        """Whether a model may be unloaded now. Requests that wait for it do not count: others were before them."""
        if slot.state != "loaded" or slot.num_held or slot.entry.pinned:
            return False
        return not self._backends.is_busy(slot.name)

    def _admit(self) -> None:
        """Load models in the order of the queue, as far as the memory goes; the first one that has to wait holds the others."""
        while self._wanted:
            slot = self._wanted[0]
            if slot.state == "loaded":  # another one wanted its memory, but does no longer
                self._leave_queue(slot)
                self._serve_waiters(slot)
            elif not slot.waiters and not slot.is_due:
                self._leave_queue(slot)
            elif slot.state == "unloading" or not self._has_room(slot):
                return
            else:
                self._leave_queue(slot)
                slot.state = "loading"
                slot.task = asyncio.create_task(self._live(slot))

    def _leave_queue(self, slot: Slot) -> None:
        self._wanted.remove(slot)
        slot.wanted_s = None
        for other in self._slots.values():  # the next one in the queue makes its own demand
            was_yielding, other.is_yielding = other.is_yielding, False
            if was_yielding and other.state == "loaded" and other in self._wanted:
                self._wanted.remove(other)
                other.wanted_s = None
                self._serve_waiters(other)

    def _has_room(self, slot: Slot) -> bool:
        """Return whether a model can be loaded now; where not, begin to make room as soon as enough of it will come."""
        missing = slot.entry.memory_bytes + self.used_bytes - self._config.memory_bytes
        if missing <= 0:
            return True
        missing -= sum([one.entry.memory_bytes for one in self._slots.values() if one.state == "unloading"])
        if missing <= 0:
            return False
        loaded = [one for one in self._slots.values() if one.state == "loaded" and not one.entry.pinned]
        loaded.sort(key=lambda one: one.last_used_s)
        idle = [one for one in loaded if self._is_idle(one)]
        chosen = _least_recent(idle, missing)
        if chosen is not None:
            for one in chosen:
                self._unload(one, "memory")
            return False
        if slot.wanted_s is not None and self._clock() - slot.wanted_s >= self._config.swap_after_s:
            for one in _least_recent([*idle, *(one for one in loaded if one not in idle)], missing) or ():
                one.is_yielding = True
        return False

    async def _live(self, slot: Slot) -> None:
        """Start a model's process, and watch it until it ends."""
        entry, begin_s = slot.entry, self._clock()
        logger.info("loading %s (%s)", slot.name, format_bytes(entry.memory_bytes))
        try:
            slot.process = self._launch(entry)
            async with asyncio.timeout(entry.start_timeout_s):
                await slot.process.wait_ready()
                await self._backends.add(slot.process.address)
        except Exception as error:
            if not isinstance(error, QuireError | OSError):  # TimeoutError is an OSError
                logger.exception("loading %s failed unexpectedly", slot.name)
            message = f"it was not ready within {entry.start_timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
            if slot.process is not None:
                await slot.process.stop(hurry=True)
            self._metrics.loads.labels(slot.name, "failed").add()
            self._fail(slot, message)
            return
        now_s = self._clock()
        slot.state, slot.error, slot.loaded_s, slot.last_used_s = "loaded", None, now_s, now_s
        slot.load_s, slot.is_due = now_s - begin_s, False
        self._metrics.loads.labels(slot.name, "loaded").add()
        self._metrics.load_seconds.labels(slot.name).observe(slot.load_s)
        logger.info("loaded %s in %.1f s", slot.name, slot.load_s)
        self._serve_waiters(slot)
        end = await slot.process.wait()
        await self._backends.remove(slot.name)
        self._metrics.unloads.labels(slot.name, "crashed").add()
        if self._clock() - slot.loaded_s >= _STABLE_S:
            slot.num_failures = 0
        self._fail(slot, f"its process ended with {end}")

    def _serve_waiters(self, slot: Slot) -> None:
        waiters, slot.waiters = slot.waiters, []
        for waiter in waiters:
            if not waiter.done():
                slot.num_held += 1
                waiter.set_result(None)

    def _refuse_waiters(self, slot: Slot, text: str) -> None:
        waiters, slot.waiters = slot.waiters, []
        for waiter in waiters:
            if not waiter.done():
                pause_s = max(slot.retry_at_s - self._clock(), 1.0)
                waiter.set_exception(self._refusal(slot, "failed", f"cannot be loaded: {text}", pause_s))

    def _fail(self, slot: Slot, message: str) -> None:
        """Note that a process failed; it is started again by a request, after a pause that grows with each failure."""
        pause_s = backoff_s(_FIRST_BACKOFF_S, slot.num_failures, self._config.max_backoff_s)
        slot.num_failures += 1
        slot.state, slot.process, slot.is_due, slot.error = "unloaded", None, False, message
        slot.retry_at_s = self._clock() + pause_s
        logger.error("the model %s failed: %s; it may be started again in %.0f s", slot.name, message, pause_s)
        self._refuse_waiters(slot, message)
        self.wake.set()

    def _unload(self, slot: Slot, reason: UnloadReason) -> None:
        logger.info("unloading %s: %s", slot.name, reason)
        self._metrics.unloads.labels(slot.name, reason).add()
        slot.state = "unloading"
        watching, slot.task = slot.task, asyncio.create_task(self._end(slot))
        if watching is not None:
            watching.cancel()

    async def _end(self, slot: Slot) -> None:
        await self._backends.remove(slot.name)
        if slot.process is not None:
            await slot.process.stop()
        slot.state, slot.process, slot.num_failures = "unloaded", None, 0
        self.wake.set()

    def show_metrics(self) -> None:
        """Bring the gauges up to date."""
        metrics = self._metrics
        for slot in self._slots.values():
            metrics.waiting.labels(slot.name).set(len(slot.waiters))
            for state in STATES:
                metrics.state.labels(slot.name, state).set(float(slot.state == state))
        metrics.memory.labels("budget").set(self._config.memory_bytes)
        metrics.memory.labels("used").set(self.used_bytes)


def _least_recent(slots: Sequence[Slot], num_bytes: int) -> list[Slot] | None:
    """Return the first of `slots` that have so much memory together, without those that are not needed; None for too little."""
    chosen: list[Slot] = []
    total = 0
    for slot in slots:
        if total >= num_bytes:
            break
        chosen.append(slot)
        total += slot.entry.memory_bytes
    if total < num_bytes:
        return None
    for slot in list(chosen):
        if total - slot.entry.memory_bytes >= num_bytes:
            chosen.remove(slot)
            total -= slot.entry.memory_bytes
    return chosen
