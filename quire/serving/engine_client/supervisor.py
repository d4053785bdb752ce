"""Supervisor: keeps one engine process running: starts it, watches it, kills it if it hangs, and restarts it or gives up."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import msgspec
import zmq

from quire.base.errors import ConfigError, InvariantError, ModelFormatError, QuireError, UnsupportedError, WorkerError
from quire.base.logging import get_logger
from quire.contracts.config import EngineConfig, Role
from quire.serving.config import ServerConfig
from quire.serving.engine_client.engine_process import ENGINE_COMMAND, EngineProcess, Launcher, ReportOptions
from quire.serving.engine_client.framing import Received
from quire.serving.engine_client.kv_events import KvEventOptions
from quire.serving.engine_client.messages import PROTOCOL_VERSION, Failed, FromEngine, Hello, Ready, Stop
from quire.serving.engine_client.watchdog import RestartPolicy, Watchdog
from quire.serving.public_error import show_error

logger = get_logger(__name__)

EngineState = Literal["starting", "ready", "sleeping", "restarting", "failed", "closed"]
"""sleeping: a state of EngineClient only, for the supervisor the engine is ready. failed: no more restarts; the reason is in
last_error."""

_TICK_S = 0.1
_FAILED_MESSAGE_S = 0.25
_CONFIG_ERRORS: dict[str, type[QuireError]] = {
    kind.__name__: kind for kind in (ConfigError, ModelFormatError, UnsupportedError)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """How the engine's process is watched; the first six are those of ServerConfig.

    stop_timeout_s  after a Stop, before the process is killed
    first_delay_s   before the first restart; doubles with each, up to max_delay_s
    command         the process
    log_level       of the process, which logs to standard error
    log_format      likewise, of ServerConfig
    environment     variables that the process gets in addition
    kv_events       where the process publishes events of KV blocks; None: nowhere
    records_timelines  the engine records the timelines of requests
    name            of the engine in the log, where there are several
    launcher        starts the process on another host; None: it is a child of this one
    """

    slow_reader_bytes: int = 256 << 10
    slow_reader_s: float = 30.0
    watchdog_timeout_s: float = 60.0
    start_timeout_s: float = 900.0
    max_restarts: int = 5
    restart_window_s: float = 600.0
    stop_timeout_s: float = 5.0
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    command: tuple[str, ...] = ENGINE_COMMAND
    log_level: str = "INFO"
    log_format: str = "text"
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    kv_events: KvEventOptions | None = None
    records_timelines: bool = False
    name: str = "the engine"
    launcher: Launcher | None = None

    @classmethod
    def of(cls, config: ServerConfig, log_level: str = "INFO") -> LinkOptions:
        """Return the options of a server."""
        return cls(
            slow_reader_bytes=config.slow_reader_bytes,
            slow_reader_s=config.slow_reader_s,
            watchdog_timeout_s=config.watchdog_timeout_s,
            start_timeout_s=config.start_timeout_s,
            max_restarts=config.max_restarts,
            restart_window_s=config.restart_window_s,
            log_level=log_level,
            log_format=config.log_format,
            kv_events=KvEventOptions.of(config.kv_events_endpoint, config.kv_events_replay_endpoint, config.kv_events_encoding),
            records_timelines=config.records_timelines,
        )


class EngineEvents(Protocol):
    """Callbacks about the engine, in the event loop. on_tick is called ten times a second, to check timeouts."""

    def on_message(self, message: FromEngine, now: float) -> None: ...

    def on_lost_outputs(self) -> None: ...

    def on_engine_end(self, reason: str) -> None: ...

    def on_state_change(self) -> None: ...

    def on_tick(self, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class _End:
    """How an engine ended: `reason` is for clients, without internal details; `error` is for the operator."""

    reason: str
    error: str
    kind: str = ""
    is_config: bool = False


class Supervisor:
    """Runs in one event loop; see EngineProcess about the thread."""

    def __init__(self, config: EngineConfig, options: LinkOptions, events: EngineEvents) -> None:
        self.state: EngineState = "starting"
        self.last_error: str | None = None
        self.num_restarts = 0
        self._config = config
        self._options = options
        self._events = events
        self._policy = RestartPolicy(options.max_restarts, options.restart_window_s, options.first_delay_s, options.max_delay_s)
        self.engine: EngineProcess | None = None
        self._watchdog: Watchdog | None = None
        self._start_deadline_s = 0.0
        self._failed: Failed | None = None
        self._task: asyncio.Task[None] | None = None
        self._first: asyncio.Future[None] | None = None
        self._grace_s = self._silent_until_s = 0.0

    def set_role(self, role: Role) -> None:
        """Start engines with this role from now on."""
        self._config = replace(self._config, role=role)

    @property
    def pid(self) -> int | None:
        """The id of the engine's process, if there is one."""
        return None if self.engine is None else self.engine.pid

    @property
    def num_sent(self) -> int:
        """Commands sent to this process."""
        return 0 if self.engine is None else self.engine.num_sent

    @property
    def silence_s(self) -> float:
        """Seconds since the last message of a ready engine's loop; infinite without one."""
        return math.inf if self._watchdog is None else self._watchdog.silence_s(time.monotonic())

    async def start(self) -> None:
        """Start the engine and wait until it is ready.

        Raises ConfigError, ModelFormatError or UnsupportedError with the engine's message, WorkerError for other failures.
        """
        if self._task is not None:
            raise InvariantError("the engine has been started before")
        self._first = asyncio.get_running_loop().create_future()
        self._first.add_done_callback(lambda first: first.exception())  # start() may have been cancelled
        self._task = asyncio.create_task(self._run(), name="quire-engine-supervisor")
        await asyncio.shield(self._first)

    def send(self, message: msgspec.Struct) -> int:
        """Send a command to a ready engine and return its number. Raises MessageError and WorkerError."""
        if self.engine is None or self.state != "ready":
            raise WorkerError(f"the engine is {self.state}")
        return self.engine.send(message)

    def expect_silence(self, is_expected: bool) -> None:
        """Set whether the engine may be silent for up to start_timeout_s from now on, because it loads or frees memory."""
        self._silent_until_s = time.monotonic() + self._options.start_timeout_s if is_expected else 0.0

    async def close(self) -> None:
        """Stop the engine, killing it after stop_timeout_s, without a restart. May be called again."""
        if self.state == "ready" and self.engine is not None:
            try:
                self.engine.send(Stop())
                self._grace_s = self._options.stop_timeout_s
            except WorkerError as error:
                logger.warning("the engine is killed: %s", error)
        self._set_state("closed")
        self._settle(WorkerError("the engine has been closed"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while True:
                end = await self._run_engine()
                delay_s = self._after(end)
                if delay_s is None:
                    return
                await asyncio.sleep(delay_s)
        except Exception as error:  # a bug here must not leave anybody waiting
            logger.exception("the engine's supervisor failed")
            self._give_up(_End("internal error", f"{type(error).__name__}: {error}"))

    async def _run_engine(self) -> _End:
        """Start a process and watch it until it ends or must be ended; it has ended when this returns."""
        self._failed = self._watchdog = None
        self._silent_until_s = 0.0
        self._start_deadline_s = time.monotonic() + self._options.start_timeout_s
        try:
            options = self._options
            engine = EngineProcess(
                self._config,
                self._on_frame,
                options.command,
                options.environment,
                ReportOptions(options.log_level, options.log_format, options.kv_events, options.records_timelines),
                options.launcher,
            )
        except ConfigError as error:
            return _End("it could not be started", str(error), "ConfigError", is_config=True)
        except (OSError, RuntimeError, zmq.ZMQError) as error:  # RuntimeError: the system has no thread for its log
            return _End("it could not be started", f"the engine's process could not be started: {error}")
        self.engine = engine
        try:
            while (end := self._find_end(engine)) is None:
                await asyncio.sleep(_TICK_S)
                engine.drain()
                self._events.on_tick(time.monotonic())
            if self._failed is None and engine.has_exited:
                end = await self._wait_failed_message(engine, end)
            self._note_end(end)
            return end
        finally:
            self.engine = self._watchdog = None
            await engine.close(self._grace_s)

    def _find_end(self, engine: EngineProcess) -> _End | None:
        if self._failed is not None:
            failed = self._failed
            text = f"{failed.kind}: {failed.message}"
            return _End(show_error(text), text, failed.kind, failed.is_config)
        status, now = engine.describe_end(), time.monotonic()
        if status is not None:
            while_what = "" if self._watchdog is not None else " while it loaded the model"
            return _End(status, f"the engine's process ended{while_what}: {status}")
        if self._watchdog is None:
            if now > self._start_deadline_s:
                text = f"the engine was not ready within start_timeout_s ({self._options.start_timeout_s:g} s)"
                return _End("it took too long to start", text)
            return None
        if now < self._silent_until_s:
            return None
        problem = self._watchdog.problem(now)
        return None if problem is None else _End("it did not answer", f"the engine hangs: {problem}")

    async def _wait_failed_message(self, engine: EngineProcess, end: _End) -> _End:
        """Wait briefly for the Failed message that a process sent before it ended; it says more than the exit status."""
        deadline_s = time.monotonic() + _FAILED_MESSAGE_S
        while self._failed is None and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
            engine.drain()
        return end if self._failed is None else self._find_end(engine) or end

    def _note_end(self, end: _End) -> None:
        """Notify the listeners at once, before the process is cleaned up."""
        # An error of the first start is raised by start(), and reported by its caller.
        level = logging.DEBUG if self._is_starting else logging.ERROR
        logger.log(level, "%s ended: %s", self._options.name, end.error)
        self.last_error = end.error
        if self.state == "ready":
            self._set_state("restarting")
        self._events.on_engine_end(end.reason)

    def _after(self, end: _End) -> float | None:
        """Return the delay before the next restart. If there is none, enter the state "failed" and return None."""
        if self._is_starting:
            self._give_up(end)
            return None
        delay_s = None if end.is_config else self._policy.next_delay_s(time.monotonic())
        if delay_s is None:
            self._give_up(end)
            return None
        self._set_state("restarting")
        self.num_restarts += 1
        logger.warning("%s is started again in %.1f s", self._options.name, delay_s)
        return delay_s

    @property
    def _is_starting(self) -> bool:
        """Whether start() is still waiting."""
        return self._first is not None and not self._first.done()

    def _give_up(self, end: _End) -> None:
        self.last_error = end.error
        self._set_state("failed")
        self._events.on_engine_end(end.reason)
        kind = _CONFIG_ERRORS.get(end.kind)
        message = end.error.removeprefix(f"{end.kind}: ")
        self._settle(WorkerError(end.error) if kind is None else kind(message))

    def _settle(self, error: QuireError | None) -> None:
        """Make start() return or raise."""
        if self._first is None or self._first.done():
            return
        if error is None:
            self._first.set_result(None)
        else:
            self._first.set_exception(error)

    def _set_state(self, state: EngineState) -> None:
        if self.state not in (state, "closed"):
            self.state = state
            self._events.on_state_change()

    def _on_frame(self, received: Received[FromEngine]) -> None:
        if received.lost is not None:
            self._events.on_lost_outputs()
        message, now = received.message, time.monotonic()
        if message is None or self.engine is None:
            return
        if self._watchdog is not None:
            self._watchdog.note(message, now)
        if isinstance(message, Hello):
            self.engine.seal()
            if message.protocol_version != PROTOCOL_VERSION:
                text = f"the engine speaks version {message.protocol_version} of the link, the server {PROTOCOL_VERSION}"
                self._failed = Failed("ConfigError", text, is_config=True)
        elif isinstance(message, Failed):
            self._failed = message
        elif isinstance(message, Ready):
            self._watchdog = Watchdog(self._options.watchdog_timeout_s, now)
            self._deliver(message, now)
            self._set_state("ready")
            self._settle(None)
        else:
            self._deliver(message, now)

    def _deliver(self, message: FromEngine, now: float) -> None:
        try:
            self._events.on_message(message, now)
        except Exception:  # a bug here must not leave anybody waiting for what the message held
            logger.exception("a message of the engine could not be taken in")
            self._events.on_lost_outputs()
