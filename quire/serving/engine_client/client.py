"""EngineClient: the engine's interface for the server's event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain

import msgspec

from quire.base.errors import RequestError, WorkerError
from quire.base.logging import get_logger
from quire.contracts.config import EngineConfig, Role
from quire.contracts.expert_stats import ExpertStats
from quire.contracts.lora import LoRARequest
from quire.contracts.rank_stats import RankStats
from quire.contracts.request import Request
from quire.contracts.sleep import SleepLevel
from quire.contracts.tier_stats import TierStats
from quire.contracts.timeline import RequestTimeline
from quire.serving.engine_client.framing import MessageError
from quire.serving.engine_client.messages import (
    Abort,
    AskTimelines,
    EngineInfo,
    FromEngine,
    Heartbeat,
    KvReport,
    LoadAdapter,
    Lost,
    Ready,
    RebalanceExperts,
    RequestDelta,
    SetPrefillUrls,
    SetRole,
    Sleep,
    SleepState,
    StepOutputs,
    Submit,
    Timelines,
    UnloadAdapter,
    WakeUp,
    Watch,
)
from quire.serving.engine_client.subscription import Subscription, coalesce
from quire.serving.engine_client.supervisor import EngineState, LinkOptions, Supervisor
from quire.serving.errors import ApiError, engine_unavailable, from_quire_error, invalid, spread_s
from quire.serving.public_error import show_error

logger = get_logger(__name__)

_COMMAND_TIMEOUT_S = 2.0
"""A command that has not reached the engine's socket after this time is lost."""

_TIMELINE_TIMEOUT_S = 2.0
"""How long the engine, which answers between its steps, may take to send timelines."""

_DELTAS_PER_TURN = 32
_ENDS_PER_TURN = 6
"""Limit of final deltas per iteration: each ends an answer, with accounting and a log line, and costs as much as many
others."""

_UNAVAILABLE = {
    "starting": "the model is being loaded",
    "restarting": "the engine is being started again",
    "sleeping": "the engine is asleep: POST /wake_up wakes it up",
    "failed": "the engine has failed",
    "closed": "the server is shutting down",
}


class EngineClient:
    """Starts an engine in its own process, restarts it when it ends, and sends requests to it.

    Used from the event loop of the main thread. Listeners are called in it: on_step and on_kv with every StepOutputs and
    KvReport, on_state with the new state, on_end with the id of a finished request and whether the engine
    ended it. An exception of the first three is logged and has no other effect.
    """

    def __init__(self, config: EngineConfig, options: LinkOptions | None = None) -> None:
        self._options = LinkOptions() if options is None else options
        self.supervisor = Supervisor(config, self._options, self)
        self.subscriptions: dict[str, Subscription] = {}
        self.aborts: dict[str, int] = {}  # aborted, unfinished requests -> abort command's number
        self._watch_hz = 0.0
        self._checkpoint = (0, 0.0)  # (number of commands sent, time)
        self.undelivered: deque[RequestDelta] = deque()
        self._num_questions = 0
        self._questions: dict[int, asyncio.Future[dict[str, RequestTimeline]]] = {}
        self._sleep_answers: dict[int, asyncio.Future[SleepState]] = {}
        self.sleep_level: SleepLevel | None = None
        self.ranks: list[RankStats] = []
        self.experts: list[ExpertStats] = []
        self.tiers: list[TierStats] = []
        self.info: EngineInfo | None = None
        self.on_step: list[Callable[[StepOutputs], None]] = []
        self.on_kv: list[Callable[[KvReport], None]] = []
        self.on_state: list[Callable[[EngineState], None]] = []
        self.on_end: list[Callable[[str, bool], None]] = []

    @property
    def replicas(self) -> tuple[EngineClient, ...]:
        """The clients of the engines: itself."""
        return (self,)

    @property
    def state(self) -> EngineState:
        """The state of the engine; it takes requests while it is "ready"."""
        state = self.supervisor.state
        return "sleeping" if state == "ready" and self.sleep_level is not None else state

    @property
    def last_error(self) -> str | None:
        """The full reason why the engine last ended: for the operator, not for clients."""
        return self.supervisor.last_error

    @property
    def pid(self) -> int | None:
        """The id of the engine's process, if there is one."""
        return self.supervisor.pid

    @property
    def num_restarts(self) -> int:
        """The number of restarts of the engine."""
        return self.supervisor.num_restarts

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last message of a ready engine's loop, including a running step; infinite without a ready
        engine."""
        return self.supervisor.silence_s

    @property
    def num_unfinished(self) -> int:
        """The number of requests whose last delta has not arrived."""
        return len(self.subscriptions)

    def has_work(self) -> bool:
        """Return whether a request is unfinished."""
        return bool(self.subscriptions)

    async def start(self) -> None:
        """Start the engine and wait until it is ready. Call once; close afterwards in any case.

        Raises ConfigError, ModelFormatError or UnsupportedError with the engine's message, WorkerError for other failures.
        """
        await self.supervisor.start()

    async def close(self) -> None:
        """End all requests and the engine's process. May be called again."""
        await self.supervisor.close()
        self._fail(self.subscriptions, engine_unavailable(_UNAVAILABLE["closed"]))
        self.aborts.clear()

    def submit(self, request: Request) -> Subscription:
        """Send a request to the engine; its id must differ from those of all unfinished ones.

        Raises ApiError: 503 while the engine is not ready, 400 for what cannot be sent.
        """
        request_id = request.request_id
        if self.state != "ready":
            raise engine_unavailable(_UNAVAILABLE[self.state])
        if request_id in self.subscriptions or request_id in self.aborts:
            raise invalid(f"the request id {request_id!r} is in use by an unfinished request", "request_id")
        try:
            sequence = self.supervisor.send(Submit.of(request))
        except RequestError as error:
            raise from_quire_error(error) from error
        except MessageError as error:
            raise invalid(f"the request cannot be taken in: {error}") from error
        except WorkerError as error:
            raise engine_unavailable(_UNAVAILABLE["restarting"]) from error
        options = self._options
        subscription = Subscription(request_id, sequence, options.slow_reader_bytes, options.slow_reader_s)
        self.subscriptions[request_id] = subscription
        return subscription

    async def load_adapter(self, lora: LoRARequest) -> None:
        """Load a LoRA adapter, unless it is loaded. Raises ApiError: 400 if it cannot be loaded, 503 while the engine is not
        ready."""
        request_id = f"lora-{uuid.uuid4().hex}"
        await self._command(LoadAdapter(request_id=request_id, lora=dataclasses.astuple(lora)))

    async def rebalance_experts(self) -> None:
        """Begin to move experts between the engine's ranks. Raises ApiError: 400 if they do not move there, or are being moved
        already, 503 while the engine is not ready."""
        await self._command(RebalanceExperts(f"experts-{uuid.uuid4().hex}"))

    async def set_prefill_urls(self, urls: list[str]) -> None:
        """Set the prefill engines that a decode engine asks. Raises ApiError: 400 if it takes none, or not these, 503 while it
        is not ready."""
        await self._command(SetPrefillUrls(f"prefill-urls-{uuid.uuid4().hex}", urls))

    async def set_role(self, role: Role) -> None:
        """Change the engine's role, also for when it is started again. Raises ApiError: 400 if it cannot have the role, 503
        while it is not ready."""
        await self._command(SetRole(f"role-{uuid.uuid4().hex}", role))
        self.supervisor.set_role(role)
        if self.info is not None:
            self.info = msgspec.structs.replace(self.info, role=role)

    async def _command(self, command: LoadAdapter | RebalanceExperts | SetPrefillUrls | SetRole) -> None:
        """Send a command, and wait for its answer. Raises ApiError: 400 if it is refused, 503 while the engine is not ready."""
        if self.state != "ready":
            raise engine_unavailable(_UNAVAILABLE[self.state])
        request_id = command.request_id
        try:
            sequence = self.supervisor.send(command)
        except WorkerError as error:
            raise engine_unavailable(_UNAVAILABLE["restarting"]) from error
        subscription = Subscription(request_id, sequence, self._options.slow_reader_bytes, self._options.slow_reader_s)
        self.subscriptions[request_id] = subscription
        delta = await subscription.next()
        if delta.error is not None and delta.is_refused:
            raise invalid(delta.error, delta.error_param)
        if delta.error is not None:
            raise _engine_error(delta.error)

    def unload_adapter(self, lora_int_id: int) -> None:
        """Unload a LoRA adapter, as soon as no request uses it. Ignored while the engine is neither ready nor asleep, as it has
        none then."""
        if self.state in ("ready", "sleeping"):
            try:
                self.supervisor.send(UnloadAdapter(lora_int_id))
            except WorkerError as error:
                logger.warning("an adapter could not be unloaded: %s", error)  # it ends with the engine

    async def check_sleep(self, level: SleepLevel) -> None:
        """Raise ApiError if the engine cannot sleep at a level, as `sleep` does; requests go on."""
        await self._change_sleep(lambda number: Sleep(number, level, is_check=True))

    async def sleep(self, level: SleepLevel) -> None:
        """Put the engine to sleep, and return when it is asleep; its unfinished requests are aborted.

        Raises ApiError: 400 if this engine cannot sleep so, 503 if it is not ready or ends.
        """
        await self._change_sleep(lambda number: Sleep(number, level))

    async def wake_up(self) -> None:
        """Wake the engine up, and return when it takes requests. Raises ApiError: 503 if it is not ready, cannot load its model
        again, or ends."""
        await self._change_sleep(WakeUp)

    async def _change_sleep(self, make_command: Callable[[int], Sleep | WakeUp]) -> None:
        if self.state not in ("ready", "sleeping"):
            raise engine_unavailable(_UNAVAILABLE[self.state])
        number = self._num_questions
        self._num_questions += 1
        answer = self._sleep_answers[number] = asyncio.get_running_loop().create_future()
        try:
            self.supervisor.send(make_command(number))
            self.supervisor.expect_silence(True)
            found = await answer
        except WorkerError as error:
            raise engine_unavailable(_UNAVAILABLE["restarting"]) from error
        finally:
            del self._sleep_answers[number]
        if found.error is not None and found.is_refused:
            raise ApiError(400, found.error, code="unsupported_value")
        if found.error is not None:
            raise engine_unavailable(f"the engine did not change its state: {show_error(found.error)}")

    def _on_sleep_state(self, message: SleepState) -> None:
        self.supervisor.expect_silence(False)
        before, self.sleep_level = self.state, message.level
        if self.state != before:
            self.on_state_change()
        answer = self._sleep_answers.get(message.number)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def abort(self, request_id: str) -> None:
        """End a request: its last delta, with finish_reason "abort", follows. Ignored for one that has ended."""
        if request_id in self.subscriptions and request_id not in self.aborts:
            self._send_abort(request_id)

    def watch(self, hz: float) -> None:
        """Request KvReports at this maximum rate per second, also from an engine that is started later; 0 for none."""
        self._watch_hz = hz
        if self.state == "ready":
            self._send_watch()

    async def timelines_of(self, request_ids: list[str]) -> dict[str, RequestTimeline]:
        """Return the timelines so far of unfinished requests; without those that the engine does not know, or does not send
        within two seconds."""
        if self.state != "ready" or not request_ids:
            return {}
        number = self._num_questions
        self._num_questions += 1
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self.supervisor.send(AskTimelines(number, request_ids))
            return await asyncio.wait_for(answer, _TIMELINE_TIMEOUT_S)
        except (WorkerError, TimeoutError) as error:
            logger.warning("the engine sent no timelines: %s", error or f"no answer within {_TIMELINE_TIMEOUT_S} s")
            return {}
        finally:
            del self._questions[number]

    # What follows is called by the supervisor.

    def on_message(self, message: FromEngine, now: float) -> None:
        """Handle a message of the engine."""
        if isinstance(message, StepOutputs):
            self._notify(self.on_step, message)  # first: a reader may end once it has its last delta
            if self.undelivered:  # delivery is scheduled but late: merge deltas for the same reader
                self.undelivered = _merge(self.undelivered, message.deltas)
            else:
                self.undelivered.extend(message.deltas)
                self._deliver_some()
        elif isinstance(message, KvReport):
            self._notify(self.on_kv, message)
        elif isinstance(message, Timelines):
            question = self._questions.get(message.number)
            if question is not None and not question.done():
                question.set_result(message.timelines)
        elif isinstance(message, Heartbeat):
            self.ranks, self.tiers, self.experts = message.ranks, message.tiers, message.experts
            self._check_commands(message, now)
        elif isinstance(message, Lost):
            self._on_lost_commands(message.first, message.last)
        elif isinstance(message, SleepState):
            self._on_sleep_state(message)
        elif isinstance(message, Ready):
            self.sleep_level = None  # also where the engine before was asleep
            self.info = message.info
            self._checkpoint = (0, now)

    def on_state_change(self) -> None:
        """Tell the listeners."""
        if self.state not in ("ready", "sleeping"):
            self.ranks, self.tiers, self.experts = [], [], []
        if self.state == "ready" and self._watch_hz > 0:
            self._send_watch()
        self._notify(self.on_state, self.state)

    def on_engine_end(self, reason: str) -> None:
        """End every request, since the engine's state is lost."""
        self._deliver_some(is_all=True)
        self.aborts.clear()
        self.sleep_level = None
        self._fail(self.subscriptions, _engine_error(reason))
        for answer in self._sleep_answers.values():
            if not answer.done():
                answer.set_exception(_engine_error(reason))

    def on_lost_outputs(self) -> None:
        """End every request, since any of them may lack a part of its output."""
        self._deliver_some(is_all=True)
        for request_id in list(self.subscriptions):
            self._send_abort(request_id)
        self._fail(self.subscriptions, _engine_error("outputs were lost"))

    def on_tick(self, now: float) -> None:
        """End the requests whose readers are too slow."""
        slow = [name for name, subscription in self.subscriptions.items() if subscription.is_slow(now)]
        for request_id in slow:
            logger.warning("request %s is aborted: its reader is too slow", request_id)
            self._send_abort(request_id)
        text = "the answer was not read as fast as it came, and has been aborted"
        self._fail(slow, ApiError(408, text, code="slow_reader", should_retry=False))

    def _deliver_some(self, is_all: bool = False) -> None:
        """Deliver deltas in order of arrival, up to a limit; the rest is delivered in the next iteration of the event loop.

        A step of hundreds of sequences wakes as many readers, and new requests and timers should not wait for all of them.
        """
        now, num_delivered, num_ends = time.monotonic(), 0, 0
        try:
            while self.undelivered and (is_all or (num_delivered < _DELTAS_PER_TURN and num_ends < _ENDS_PER_TURN)):
                delta = self.undelivered.popleft()
                num_delivered += 1
                num_ends += delta.finished
                self._deliver(delta, now)
        except Exception:  # a bug here must not leave readers waiting
            logger.exception("outputs could not be delivered")
            self.undelivered.clear()
            self.on_lost_outputs()
        if self.undelivered:
            asyncio.get_running_loop().call_soon(self._deliver_some)

    def _deliver(self, delta: RequestDelta, now: float) -> None:
        request_id = delta.request_id
        subscription = self.subscriptions.get(request_id)
        if delta.finished:
            self.aborts.pop(request_id, None)
            if self.subscriptions.pop(request_id, None) is not None:
                for listener in self.on_end:
                    listener(request_id, True)
        if subscription is not None:
            subscription.deliver(delta, now)

    def _check_commands(self, beat: Heartbeat, now: float) -> None:
        """Find commands that were sent long ago and did not arrive, if no later command reveals the gap."""
        # The engine's messages about the commands that it counts were sent before the heartbeat.
        self.aborts = {name: sequence for name, sequence in self.aborts.items() if sequence >= beat.num_commands}
        num_sent, by_s = self._checkpoint
        if beat.time_s < by_s + _COMMAND_TIMEOUT_S:
            return
        if beat.num_commands < num_sent:
            self._on_lost_commands(beat.num_commands, num_sent - 1)
        self._checkpoint = (self.supervisor.num_sent, now)

    def _on_lost_commands(self, first: int, last: int) -> None:
        logger.error("the commands %d to %d did not reach the engine", first, last)
        lost = [name for name, found in self.subscriptions.items() if first <= found.sequence <= last]
        for request_id in lost:
            self.aborts.pop(request_id, None)
        self._fail(lost, _engine_error("the request was lost"))
        for request_id in [name for name, sequence in self.aborts.items() if first <= sequence <= last]:
            self._send_abort(request_id)
        if self._watch_hz > 0:
            self._send_watch()

    def _fail(self, request_ids: Iterable[str], error: ApiError) -> None:
        for request_id in list(request_ids):
            self.subscriptions.pop(request_id).fail(error)
            for listener in self.on_end:
                listener(request_id, False)

    def _send_abort(self, request_id: str) -> None:
        try:
            self.aborts[request_id] = self.supervisor.send(Abort([request_id]))
        except WorkerError as error:
            logger.warning("request %s could not be aborted: %s", request_id, error)  # the request ends when the engine ends

    def _send_watch(self) -> None:
        try:
            self.supervisor.send(Watch(self._watch_hz))
        except WorkerError as error:
            logger.warning("the live view could not be switched: %s", error)

    def _notify(self, listeners: list[Callable[..., None]], item: object) -> None:
        for listener in listeners:
            try:
                listener(item)
            except Exception:
                logger.exception("a listener of the engine failed")


def _merge(earlier: Iterable[RequestDelta], later: Iterable[RequestDelta]) -> deque[RequestDelta]:
    """Return the merged outputs, with one delta for each request."""
    by_request: dict[str, list[RequestDelta]] = {}
    for delta in chain(earlier, later):
        by_request.setdefault(delta.request_id, []).append(delta)
    return deque([coalesce(deltas) for deltas in by_request.values()])


def _engine_error(reason: str) -> ApiError:
    text = f"the engine stopped while the request ran ({reason})"
    return ApiError(503, text, code="engine_error", retry_after_s=spread_s(5.0))
