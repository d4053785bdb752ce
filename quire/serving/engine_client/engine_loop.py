"""EngineLoop: receives commands, runs steps and sends outputs, in the main thread of the engine's process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from quire.base.errors import ConfigError, QuireError, RequestError, UnsupportedError
from quire.base.logging import get_logger
from quire.contracts.lora import LoRARequest
from quire.serving.engine_client.deltas import DeltaWriter
from quire.serving.engine_client.framing import MessageError
from quire.serving.engine_client.kv_events import KvEventPublisher
from quire.serving.engine_client.messages import (
    MAX_STEP_PARTS,
    Abort,
    AskTimelines,
    Heartbeat,
    KvReport,
    LoadAdapter,
    RebalanceExperts,
    RequestDelta,
    SetPrefillUrls,
    SetRole,
    Sleep,
    SleepState,
    StepOutputs,
    StepPart,
    StepReport,
    Stop,
    Submit,
    Timelines,
    ToEngine,
    UnloadAdapter,
    WakeUp,
    Watch,
)

if TYPE_CHECKING:  # it imports torch, which tests of the loop with another engine do not need
    from quire.engine.llm_engine import EngineOutput, LLMEngine

logger = get_logger(__name__)

_HEARTBEAT_S = 1.0
_HEALTH_CHECK_S = 0.25
"""The interval in which an idle engine checks that its workers are alive."""
_MAX_WATCH_HZ = 30.0
_WATCH_SHARE = 0.05
"""The maximum share of time for KvReports."""


class Port(Protocol):
    """The interface that the loop needs for messages; EnginePort implements it."""

    last_empty_s: float

    @property
    def num_commands(self) -> int: ...

    def receive(self, timeout_s: float) -> list[ToEngine]: ...

    def send(self, message: msgspec.Struct) -> None: ...

    def check_peer(self) -> None: ...


class EngineLoop:
    """Runs an engine for the server. An error of one request ends only that request."""

    def __init__(
        self,
        engine: LLMEngine,
        port: Port,
        has_workers: bool = False,
        kv_events: KvEventPublisher | None = None,
        counts_experts: bool = False,
    ) -> None:
        """Take over an engine that is loaded.

        has_workers  the engine has processes of its own, which may end while it is idle
        kv_events    told which blocks the prefix cache holds, after each step; not closed here
        counts_experts  heartbeats have the tokens of the experts
        """
        self._kv_events = kv_events
        if kv_events is not None:
            engine.scheduler.kv.index.changes = []
        self._has_workers, self._counts_experts = has_workers, counts_experts
        engine.is_recording = True
        self._engine = engine
        self._port = port
        self._deltas = DeltaWriter()
        self._replies: list[RequestDelta] = []
        self._sleeps: list[int] = []  # numbers of the Sleep commands that are not answered
        self._next_beat_s = 0.0
        self._watch_interval_s: float | None = None
        self._next_watch_s = 0.0

    def run(self) -> None:
        """Run until a Stop arrives. Raises PeerGoneError if the server has ended, and the exceptions of a broken engine."""
        engine = self._engine
        while True:
            self._publish()
            wait_s = 0.0 if engine.has_unfinished_requests() or engine.save_pages() else self._idle_s()
            for command in self._port.receive(wait_s):
                if isinstance(command, Stop):
                    return
                self._handle_command(command)
            self._send_replies()
            if engine.has_unfinished_requests():
                self._step()
                self._end_sleeps()

    def _idle_s(self) -> float:
        due_s = self._next_beat_s if self._watch_interval_s is None else min(self._next_beat_s, self._next_watch_s)
        idle_s = max(0.001, due_s - time.monotonic())
        return min(_HEALTH_CHECK_S, idle_s) if self._has_workers else idle_s

    def _publish(self) -> None:
        """Send the heartbeat and the KvReport if they are due."""
        now = time.monotonic()
        if self._has_workers:
            self._engine.check_health()
        if now >= self._next_beat_s:
            self._next_beat_s = now + _HEARTBEAT_S
            self._port.check_peer()
            steps, unfinished = self._engine.stats.num_steps, self._engine.num_unfinished_requests()
            ranks = self._engine.stats.ranks if self._has_workers else []
            tiers = self._engine.stats.tiers
            experts = self._engine.stats.experts if self._counts_experts else []
            num_commands = self._port.num_commands
            self._port.send(Heartbeat(self._port.last_empty_s, steps, unfinished, num_commands, ranks, tiers, experts))
        if self._watch_interval_s is not None and now >= self._next_watch_s:
            self._send_kv_report(now, self._watch_interval_s)

    def _send_kv_report(self, now: float, interval_s: float) -> None:
        try:
            self._port.send(self.kv_report(now))
        except MessageError:
            logger.exception("the KV blocks are not reported any more")
            self._watch_interval_s = None
        self._next_watch_s = now + max(interval_s, (time.monotonic() - now) / _WATCH_SHARE)

    def _handle_command(self, command: ToEngine) -> None:
        if isinstance(command, Submit):
            self._submit(command)
        elif isinstance(command, Abort):
            for request_id in command.request_ids:
                self._abort(request_id)
        elif isinstance(command, Watch):
            is_on = command.hz > 0
            self._watch_interval_s = 1 / min(command.hz, _MAX_WATCH_HZ) if is_on else None
            self._next_watch_s = 0.0
        elif isinstance(command, LoadAdapter):
            self._load_adapter(command)
        elif isinstance(command, UnloadAdapter):
            self._engine.remove_lora(command.lora_int_id)
        elif isinstance(command, Sleep):
            self._begin_sleep(command)
        elif isinstance(command, WakeUp):
            self._wake_up(command)
        elif isinstance(command, RebalanceExperts):
            self._rebalance_experts(command)
        elif isinstance(command, SetPrefillUrls):
            self._set_prefill_urls(command)
        elif isinstance(command, SetRole):
            self._set_role(command)
        elif isinstance(command, AskTimelines):
            self._send_timelines(command)

    def _send_replies(self) -> None:
        if self._replies:
            replies, self._replies = self._replies, []
            self._send(replies, None)

    def _send_timelines(self, command: AskTimelines) -> None:
        self._send_replies()  # a request without a timeline has then ended for the server, too
        found = {request_id: self._engine.timeline_of(request_id) for request_id in command.request_ids}
        timelines = {request_id: timeline for request_id, timeline in found.items() if timeline is not None}
        try:
            self._port.send(Timelines(command.number, timelines))
        except MessageError:
            logger.exception("the timelines of %d requests cannot be sent", len(timelines))
            self._port.send(Timelines(command.number, {}))

    def _load_adapter(self, command: LoadAdapter) -> None:
        delta = RequestDelta(command.request_id, [], True)
        try:
            self._engine.add_lora(LoRARequest(*command.lora))
        except RequestError as error:
            delta.error, delta.error_param, delta.is_refused = str(error), error.param, True
        except ConfigError as error:  # the engine is asleep
            delta.error, delta.is_refused = str(error), True
        except Exception as error:
            logger.exception("the adapter %s could not be loaded", command.lora[0])
            delta.error = _describe(error)
        self._replies.append(delta)

    def _begin_sleep(self, command: Sleep) -> None:
        try:
            if command.is_check:
                self._engine.check_sleep(command.level)
                self._port.send(SleepState(command.number, self._engine.sleep_level))
                return
            self._engine.begin_sleep(command.level)
        except QuireError as error:
            self._port.send(SleepState(command.number, self._engine.sleep_level, str(error), is_refused=True))
            return
        self._sleeps.append(command.number)
        self._end_sleeps()

    def _end_sleeps(self) -> None:
        """Answer the Sleep commands if the engine is asleep."""
        if self._sleeps and not self._engine.has_unfinished_requests():
            numbers, self._sleeps = self._sleeps, []
            for number in numbers:
                self._port.send(SleepState(number, self._engine.sleep_level))

    def _wake_up(self, command: WakeUp) -> None:
        numbers, self._sleeps = self._sleeps, []
        for number in numbers:
            self._port.send(SleepState(number, None, "it was woken up before it was asleep"))
        try:
            self._engine.wake_up()
        except QuireError as error:
            logger.exception("the engine could not be woken up")
            self._port.send(SleepState(command.number, self._engine.sleep_level, _describe(error)))
            return
        self._port.send(SleepState(command.number, None))

    def _rebalance_experts(self, command: RebalanceExperts) -> None:
        delta = RequestDelta(command.request_id, [], True)
        try:
            if not self._engine.rebalance_experts():
                delta.error = "the experts are being moved already, or the system has no thread for it: try again later"
                delta.is_refused = True
        except ConfigError as error:
            delta.error, delta.is_refused = str(error), True
        self._replies.append(delta)

    def _set_prefill_urls(self, command: SetPrefillUrls) -> None:
        delta, remote = RequestDelta(command.request_id, [], True), self._engine.remote_prefill
        try:
            is_decode = remote is not None and remote.is_open
            if not is_decode or self._engine.config.prefill_urls is not None:
                what = "is no decode engine" if not is_decode else "was started with prefill_urls, which are fixed"
                raise ConfigError(f"this engine {what}: start it with the role 'decode' and without prefill_urls")
            remote.set_urls(command.urls)
        except ConfigError as error:
            delta.error, delta.is_refused = str(error), True
        self._replies.append(delta)

    def _set_role(self, command: SetRole) -> None:
        delta = RequestDelta(command.request_id, [], True)
        try:
            self._engine.transfer.set_role(command.role)
        except ConfigError as error:
            delta.error, delta.is_refused = str(error), True
        self._replies.append(delta)

    def _submit(self, command: Submit) -> None:
        try:
            request = command.request()
            self._engine.check_request(request)
            self._engine.submit(request, "delta")
        except (RequestError, UnsupportedError) as error:
            param = error.param if isinstance(error, RequestError) else None
            self._replies.append(
                RequestDelta(command.request_id, [], True, error=str(error), error_param=param, is_refused=True)
            )
        except Exception as error:
            logger.exception("request %s could not be taken in", command.request_id)
            self._replies.append(RequestDelta(command.request_id, [], True, error=_describe(error)))
        else:
            self._deltas.begin(command.request_id)

    def _abort(self, request_id: str) -> None:
        output = self._engine.abort_request(request_id)
        if output is not None:
            self._replies.append(self._write(output))

    def _step(self) -> None:
        before = self._engine.last_step
        deltas = [self._write(output) for output in self._engine.step()]
        if self._kv_events is not None:
            self._publish_changes(self._kv_events)
        report = None if self._engine.last_step is before else self._report()
        if deltas or report is not None:
            self._send(deltas, report)

    def _publish_changes(self, kv_events: KvEventPublisher) -> None:
        index = self._engine.scheduler.kv.index
        changes, index.changes = index.changes, []
        if changes:
            kv_events.publish(changes)

    def _write(self, output: EngineOutput) -> RequestDelta:
        try:
            return self._deltas.write(output)
        except Exception as error:
            logger.exception("the output of request %s failed", output.request_id)
            return self._fail(output.request_id, _describe(error))

    def _fail(self, request_id: str, reason: str) -> RequestDelta:
        """End a request whose output cannot be sent; return the delta to send instead."""
        self._engine.abort_request(request_id)
        self._deltas.forget(request_id)
        return RequestDelta(request_id, [], True, error=reason)

    def _send(self, deltas: list[RequestDelta], report: StepReport | None) -> None:
        """Send outputs in one message; if that fails, one by one, so that only the faulty ones fail."""
        try:
            self._port.send(StepOutputs(deltas, report))
            return
        except MessageError as error:
            if not deltas:
                raise
            if len(deltas) == 1:
                logger.exception("the output of request %s cannot be sent", deltas[0].request_id)
                deltas = [self._fail(deltas[0].request_id, str(error))]
        for delta in deltas:
            self._send([delta], None)
        if report is not None:
            self._port.send(StepOutputs([], report))

    def _report(self) -> StepReport | None:
        record, scheduler, stats = self._engine.last_step, self._engine.scheduler, self._engine.stats
        if record is None:
            return None
        shares, stages = record.shares, self._engine.stage_times
        num_prefill = sum([num_tokens for _, _, num_tokens, is_prefill in shares if is_prefill])
        parts = [StepPart(*share) for share in shares[:MAX_STEP_PARTS]]
        parts += [StepPart(*share) for share in shares[MAX_STEP_PARTS:] if share[3]]
        return StepReport(
            step_id=record.step_id,
            started_s=record.started_s,
            duration_s=record.duration_s,
            num_prefill_tokens=num_prefill,
            num_decode_tokens=sum([num_tokens for _, _, num_tokens, _ in shares]) - num_prefill,
            attended=[tuple(counts) for counts in record.attended],
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_free_blocks=scheduler.kv.pool.num_free,
            num_cached_blocks=scheduler.kv.num_cached_blocks,
            total_preemptions=scheduler.num_preemptions,
            total_prefix_queries=scheduler.prefix_cache_queries,
            total_prefix_hits=scheduler.prefix_cache_hits,
            parts=parts,
            total_drafts=stats.num_drafts,
            total_draft_tokens=stats.num_draft_tokens,
            total_accepted_per_pos=stats.accepted_per_pos,
            total_stage_busy_s=[] if stages is None else list(stages.busy_s),
            total_active_s=0.0 if stages is None else stages.active_s,
            total_evicted_blocks=scheduler.num_evicted_blocks,
            total_runs=scheduler.run_counts,
        )

    def kv_report(self, now: float) -> KvReport:
        """Return the blocks of the KV pool: those of each running request, and the cached ones."""
        scheduler = self._engine.scheduler
        blocks: dict[str, list[int]] = {}
        for sequence in scheduler.running:
            blocks.setdefault(sequence.request.request_id, []).extend(dict.fromkeys(sequence.block_ids))
        return KvReport(now, scheduler.config.num_kv_blocks, blocks, list(scheduler.kv.cached_block_ids()))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
