"""EngineGateway: admits jobs, dispatches them from the fair queue to the engine, and closes every job exactly once."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import msgspec

from quire.base.errors import InvariantError, RequestError
from quire.serving.admission import AdmissionControl
from quire.serving.admission.fair_queue import CLASS_WEIGHTS
from quire.serving.engine_client.messages import StepOutputs
from quire.serving.engine_client.supervisor import EngineState
from quire.serving.errors import ApiError, deadline_exceeded, engine_unavailable, from_quire_error, shutting_down, wrong_role
from quire.serving.interfaces import AbortReason, Job
from quire.serving.metrics.server_metrics import ServerMetrics
from quire.serving.public_error import show_error
from quire.serving.request_queue.engine import Engine
from quire.serving.request_queue.stream import JobStream

_FED_AHEAD_SHARE = 8
"""For this many running sequences one more is in the engine, so that it does not idle until the next dispatch."""
_FED_AHEAD_LEAST = 4
_SWEEP_S = 1.0
_NOTHING_HELD = nullcontext()


class ClassSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The waiting work of one class. estimated_wait_s is for a new owner's request of one sequence."""

    priority: str
    num_requests: int
    num_sequences: int
    num_prompt_tokens: int
    num_expected_tokens: int
    oldest_wait_s: float
    estimated_wait_s: float


class QueueSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the queue and the engine, for the live view. Rates are None until they are measured."""

    classes: list[ClassSnapshot]
    num_in_engine: int
    num_sequences_in_engine: int
    capacity: int
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    is_draining: bool


class EngineGateway:
    """The Gateway of a server. Runs on one event loop.

    A job is in the queue, then in the engine, then closed. It is closed once: by the engine's last delta, by removal from the
    queue, or by the engine's end. An abort is sent to the engine at most once, and never after the last delta.
    """

    def __init__(
        self,
        engine: Engine,
        admission: AdmissionControl,
        metrics: ServerMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._metrics = metrics
        self._clock = clock
        self._queued: dict[int, JobStream] = {}
        self._running: dict[str, JobStream] = {}
        self._num_read = 0
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_draining = False
        self._refusal: ApiError | None = None
        self._drain_ends_s = math.inf
        self._is_dispatching = False
        self._quiet = asyncio.Event()
        self._quiet.set()
        engine.on_step.append(self._on_step)
        engine.on_state.append(self._on_state)
        metrics.on_collect.append(self._write_gauges)
        self._on_state(engine.state)

    @property
    def capacity(self) -> int:
        """Return the maximum number of sequences in the engine: those it can run, and a few more.

        Sequences of class "batch", which are paused for others there, do not count against other classes.
        """
        running = self._admission.max_num_seqs
        return running + max(_FED_AHEAD_LEAST, running // _FED_AHEAD_SHARE)

    @property
    def batch_window(self) -> int:
        """Return how many sequences of class "batch" may be open at once."""
        return self._admission.batch_window

    def open(self, job: Job) -> JobStream:
        """Queue a job. Raises ApiError at once if it is not admitted: 408, 429 or 503."""
        if job.request.request_id in self._metrics.records:
            raise InvariantError(f"a request with the id {job.request.request_id} is already open")
        self._check_open()
        ticket = self._admission.admit(job)
        stream = JobStream(self, ticket, self._metrics.opened(job))
        self._queued[ticket.number] = stream
        self._quiet.clear()
        if job.deadline_s is not None:
            loop = asyncio.get_running_loop()
            stream.timer = loop.call_later(max(job.deadline_s - self._clock(), 0), self._on_deadline, stream)
        self._dispatch()
        return stream

    def holding(self, owner: str, call_id: str | None) -> AbstractContextManager[None]:
        """Count a call as in flight for its key while it is prepared; without an id (a batch) count nothing."""
        return _NOTHING_HELD if call_id is None else self._admission.holding(owner, call_id)

    def ratelimit_headers(self, owner: str) -> dict[str, str]:
        """Return the x-ratelimit-* headers of an owner; empty without rates."""
        return self._admission.ratelimit_headers(owner)

    def start_drain(self, longest_s: float = math.inf) -> None:
        """Refuse new jobs from now on; queued and running jobs continue, for at most `longest_s`."""
        self._is_draining = True
        self._drain_ends_s = self._clock() + longest_s

    @property
    def drain_left_s(self) -> float:
        """The expected time for all held jobs, at most the drain's limit. A client that retries earlier finds this server
        draining."""
        return max(min(self._admission.work_left_s, self._drain_ends_s - self._clock()), 0.0)

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no job is open and no stream is being read; False if that takes longer than timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.emptied()
        except TimeoutError:
            return False
        return True

    async def emptied(self) -> None:
        """Wait until no job is open and no stream is being read."""
        await self._quiet.wait()

    def fail_all(self, reason: AbortReason = "shutdown", error: ApiError | None = None) -> None:
        """End every job now with an error, that of a shutdown by default; the engine is told to abort what it has."""
        for stream in [*self._queued.values(), *self._running.values()]:
            stream.fail(shutting_down("server_shutdown") if error is None else error)
            self.end_early(stream, reason)

    @contextmanager
    def refusing(self, error: ApiError) -> Iterator[None]:
        """Refuse new jobs with an error within the block; those that are open continue."""
        self._refusal = error
        try:
            yield
        finally:
            self._refusal = None

    def snapshot(self) -> QueueSnapshot:
        """Return the state of the queue and the engine."""
        admission, now_s = self._admission, self._clock()
        classes: list[ClassSnapshot] = []
        for priority in CLASS_WEIGHTS:
            backlog, oldest = admission.queue.backlog(priority), admission.queue.oldest(priority)
            classes.append(
                ClassSnapshot(
                    priority=priority,
                    num_requests=backlog.num_requests,
                    num_sequences=backlog.num_sequences,
                    num_prompt_tokens=backlog.num_prompt_tokens,
                    num_expected_tokens=backlog.num_expected_tokens,
                    oldest_wait_s=0.0 if oldest is None else now_s - oldest.enqueued_s,
                    estimated_wait_s=admission.estimated_wait_s(priority, ""),
                )
            )
        return QueueSnapshot(
            classes=classes,
            num_in_engine=len(self._running),
            num_sequences_in_engine=admission.num_taken_sequences,
            capacity=self.capacity,
            prefill_tokens_per_s=admission.rates.prefill_tokens_per_s,
            decode_tokens_per_s=admission.rates.decode_tokens_per_s,
            is_draining=self._is_draining,
        )

    # Called by streams.

    def end_early(self, stream: JobStream, reason: AbortReason) -> None:
        """Remove the job from the queue, or abort it in the engine. No effect if that has happened or the job has ended."""
        if stream.is_closed or stream.is_aborted:
            return
        self._metrics.aborted(stream.record, reason)
        if stream.subscription is None:
            stream.finish_unstarted()
            self._close(stream, "abort")
            self._dispatch()
            return
        stream.is_aborted = True
        self._engine.abort(stream.request_id)

    def subscription_failed(self, stream: JobStream, error: ApiError) -> None:
        """Record that the engine's client has failed the request; it has aborted it if the engine is running."""
        if error.code == "slow_reader":
            self._metrics.aborted(stream.record, "slow_reader")
        if not stream.is_closed:
            self._close(stream, "abort" if error.code == "slow_reader" else "error", error.message)
            self._dispatch()

    def left(self, stream: JobStream) -> None:
        """Record that the stream is no longer read."""
        if stream.is_read:
            stream.is_read = False
            self._num_read -= 1
        self._check_quiet()

    def entered(self, stream: JobStream) -> None:
        """Record that the stream is being read."""
        stream.is_read = True
        self._num_read += 1
        self._quiet.clear()

    # Called by the engine's client and by timers.

    def _on_step(self, outputs: StepOutputs) -> None:
        self._metrics.step(outputs)
        if outputs.report is not None:
            self._admission.observe(outputs.report)
        has_room = False
        for delta in outputs.deltas:
            if not delta.finished:
                continue
            stream = self._running.get(delta.request_id)
            if stream is None:
                continue
            has_room = True
            error = None if stream.subscription is None else stream.subscription.error
            if error is None:
                self._close(stream, "stop")
            else:  # its reader, which would report this, may be blocked in sending
                self.subscription_failed(stream, error)
        if has_room:
            self._dispatch()

    def _on_state(self, state: EngineState) -> None:
        for index, replica in enumerate(self._engine.replicas):
            self._metrics.engine_state(replica.state, index)
            if replica.state == "ready" and replica.info is not None:
                self._metrics.engine_ready(replica.info, index)
        info = self._engine.info
        if state == "ready" and info is not None:  # requests of an ended replica end by their subscriptions
            self._admission.max_num_seqs = info.max_num_seqs
            self._dispatch()
            return
        error = self._unavailable()
        for stream in list(self._queued.values()):
            stream.fail(error)
            self._close(stream, "error", error.message)
        for stream in list(self._running.values()):  # the readers are notified by their subscriptions
            self._close(stream, "error", error.message)

    def _sweep(self) -> None:
        """Close jobs that the engine's client failed while nobody was reading them, such as lost requests."""
        self._sweeper = None
        for stream in list(self._running.values()):
            if stream.subscription is None or not stream.subscription.is_finished:
                continue
            error = stream.subscription.error
            if error is not None:
                self.subscription_failed(stream, error)
            else:
                self._close(stream, "error", "given up by the engine's client")
        if self._running:
            self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)
        self._dispatch()

    def _on_deadline(self, stream: JobStream) -> None:
        if not stream.is_closed:
            stream.fail(deadline_exceeded(while_queued=stream.subscription is None))
            self.end_early(stream, "deadline")

    def _check_open(self) -> None:
        if self._is_draining:
            raise shutting_down(after_s=self.drain_left_s)
        if self._refusal is not None:
            raise self._refusal
        if self._engine.state != "ready" or self._engine.info is None:
            raise self._unavailable()
        if self._engine.info.role == "prefill":
            raise wrong_role("this server computes prompts for decode servers only (--role prefill): send requests to those")

    def _unavailable(self) -> ApiError:
        said = {"starting": "is being started", "restarting": "ended and is being started again", "closed": "is shut down"}
        said["sleeping"] = "is asleep: POST /wake_up wakes it up"
        why = self._engine.last_error if self._engine.state in ("restarting", "failed") else None
        reason = "" if why is None else f" ({show_error(why)})"
        return engine_unavailable(f"the engine {said.get(self._engine.state, 'has failed')}{reason}")

    def _dispatch(self) -> None:
        """Submit jobs while the engine has room. Submitting may call back into this object."""
        if self._is_dispatching:
            return
        self._is_dispatching = True
        try:
            while self._engine.state == "ready" and (ticket := self._admission.take(self.capacity)) is not None:
                self._submit(self._queued.pop(ticket.number))
        finally:
            self._is_dispatching = False

    def _submit(self, stream: JobStream) -> None:
        deadline_s, request = stream.job.deadline_s, stream.job.request
        self._running[request.request_id] = stream
        if deadline_s is not None and deadline_s <= self._clock():
            self._metrics.aborted(stream.record, "deadline")
            stream.fail(deadline_exceeded(while_queued=True))
            self._close(stream, "abort")
            return
        dispatched_s = self._clock()  # sending wakes the engine, which may take the core before this goes on
        try:
            is_background = stream.job.priority == "batch"
            subscription = self._engine.submit(replace(request, is_background=True) if is_background else request)
        except (ApiError, RequestError) as error:
            refusal = error if isinstance(error, ApiError) else from_quire_error(error)
            stream.fail(refusal)
            if refusal.status < 500:
                self._metrics.refused(stream.record, refusal)
            self._close(stream, "error", refusal.message)
            return
        self._metrics.dispatched(stream.record, dispatched_s)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)
        stream.start(subscription)

    def _close(self, stream: JobStream, finish_reason: str, error: str | None = None) -> None:
        if stream.is_closed:
            raise InvariantError(f"request {stream.request_id} was closed twice")
        stream.is_closed = True
        if stream.timer is not None:
            stream.timer.cancel()
        self._queued.pop(stream.ticket.number, None)
        self._running.pop(stream.request_id, None)
        self._metrics.ended(stream.record, finish_reason, error)
        is_complete = stream.record.has_ended_well and not stream.is_aborted
        self._admission.finish(stream.ticket, stream.record.num_output_tokens, is_complete)
        self._check_quiet()

    def _check_quiet(self) -> None:
        if not (self._queued or self._running or self._num_read):
            self._quiet.set()

    def _write_gauges(self) -> None:
        defined, queue = self._metrics.defined, self._admission.queue
        backlogs = {priority: queue.backlog(priority) for priority in CLASS_WEIGHTS}
        for priority, backlog in backlogs.items():
            defined.queued.labels(priority).set(backlog.num_requests)
            defined.queued_tokens.labels(priority).set(backlog.num_prompt_tokens)
        for engine in self._metrics.engines:
            engine.write_gauges(self._admission.num_taken_sequences if self._running else 0)
        # In the engine, too, those of class "batch" have the lowest priority.
        in_engine = min(self._metrics.num_engine_waiting, self._admission.num_taken_batch_sequences)
        num_deferred = backlogs["batch"].num_requests + in_engine
        num_waiting = len(queue) + self._metrics.num_engine_waiting
        defined.waiting.labels().set(num_waiting)
        defined.waiting_by_reason.labels("deferred").set(num_deferred)
        defined.waiting_by_reason.labels("capacity").set(num_waiting - num_deferred)
