"""TimelineStore: the timelines of the last ended requests, and the engine's last steps."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

from quire.contracts.timeline import RequestTimeline, TimelineEvent
from quire.serving.engine_client.messages import StepOutputs
from quire.serving.metrics.request_record import RequestRecord

MAX_STEPS = 4096
"""Steps that are kept, of all engines together."""


class KeptStep(NamedTuple):
    """One step of an engine: the part of a StepReport that a trace shows. started_s is of time.monotonic()."""

    replica: int
    step_id: int
    started_s: float
    duration_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    num_waiting: int
    num_free_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTimeline:
    """What is kept of a request; neither its prompt nor its output. Times are seconds of time.monotonic(), see RequestRecord.

    owner       name of the API key
    phase       of an unfinished request, RequestRecord.phase; "ended" otherwise
    ended_s     the time of the question, for an unfinished request
    """

    request_id: str
    call_id: str | None
    client_id: str | None
    owner: str
    route: str
    priority: str
    replica: int
    phase: str
    arrival_s: float
    opened_s: float
    dispatched_s: float | None
    first_output_s: float | None
    last_output_s: float | None
    ended_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    finish_reasons: tuple[str, ...]
    abort_reason: str | None
    error: str | None
    events: tuple[TimelineEvent, ...]
    num_dropped_events: int

    @classmethod
    def of(cls, record: RequestRecord, now_s: float, timeline: RequestTimeline | None = None) -> KeptTimeline:
        """Return what is kept of a record; timeline: of the engine, if it is not in the record yet."""
        job, engine = record.job, record.engine
        if timeline is None and engine is not None:
            timeline = engine.timeline
        return cls(
            request_id=job.request.request_id,
            call_id=job.call_id,
            client_id=job.client_id,
            owner=job.owner.name,
            route=job.route,
            priority=job.priority,
            replica=record.replica,
            phase=record.phase if record.ended_s is None else "ended",
            arrival_s=record.arrival_s,
            opened_s=record.opened_s,
            dispatched_s=record.dispatched_s,
            first_output_s=record.first_output_s,
            last_output_s=record.last_output_s,
            ended_s=now_s if record.ended_s is None else record.ended_s,
            num_prompt_tokens=record.num_prompt_tokens,
            num_cached_tokens=0 if engine is None else engine.num_cached_tokens,
            num_output_tokens=record.num_output_tokens,
            num_preemptions=0 if engine is None else engine.num_preemptions,
            finish_reasons=tuple(record.finish_reasons),
            abort_reason=record.abort_reason,
            error=record.error,
            events=() if timeline is None else tuple(timeline.events),
            num_dropped_events=0 if timeline is None else timeline.num_dropped,
        )

    def has_id(self, wanted: str) -> bool:
        """Whether an id is one of the request's, see `is_request_named`."""
        return is_request_named(wanted, self.request_id, self.call_id, self.client_id)


def is_request_named(wanted: str, request_id: str, call_id: str, client_id: str | None) -> bool:
    """Whether an id is the request's own, that of its answer, that of its HTTP request, or what the client called that.

    A completion `cmpl-1` has a request for each of its prompts: `cmpl-1-0`, `cmpl-1-1`.
    """
    answer, dash, place = request_id.rpartition("-")
    return wanted in (request_id, call_id, client_id) or (bool(dash) and place.isdecimal() and wanted == answer)


class TimelineStore:
    """Register `keep` with ServerMetrics.on_end, and `note_step` with the engine's on_step.

    max_kept  ended requests that are kept, at least 1; the oldest are dropped
    """

    def __init__(self, max_kept: int) -> None:
        self.max_kept = max_kept
        self._ended: OrderedDict[str, KeptTimeline] = OrderedDict()
        self.steps: deque[KeptStep] = deque(maxlen=MAX_STEPS)

    def __len__(self) -> int:
        return len(self._ended)

    def keep(self, record: RequestRecord) -> None:
        """Keep the timeline of a request that has ended."""
        kept = KeptTimeline.of(record, record.arrival_s if record.ended_s is None else record.ended_s)
        self._ended[kept.request_id] = kept
        if len(self._ended) > self.max_kept:
            self._ended.popitem(last=False)

    def note_step(self, outputs: StepOutputs) -> None:
        """Keep a step."""
        report = outputs.report
        if report is not None:
            self.steps.append(
                KeptStep(
                    outputs.replica,
                    report.step_id,
                    report.started_s,
                    report.duration_s,
                    report.num_prefill_tokens,
                    report.num_decode_tokens,
                    report.num_running,
                    report.num_waiting,
                    report.num_free_blocks,
                )
            )

    def ended(self, owner: str | None) -> list[KeptTimeline]:
        """Return the kept requests of an owner, None: of all, in the order of their ends."""
        return [kept for kept in self._ended.values() if owner is None or kept.owner == owner]
