"""The answers of the routes of timelines, as JSON: made from KeptTimelines."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from quire.contracts.timeline import TimelineEvent
from quire.serving.metrics.phases import seconds_by_phase, summary_of
from quire.serving.metrics.timelines import KeptStep, KeptTimeline
from quire.serving.public_error import show_error

_NONE = 0.0  # fields are left out that hold this very object


class TimelinePhase(msgspec.Struct, frozen=True):
    """Seconds of one phase of a request, and their share of the whole time, 0 to 1."""

    phase: str
    seconds: float
    share: float


class TimelineEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event. start_s: seconds since the arrival of the request.

    kind  of the server, instants: received, queued, dispatched, first_token, last_token, ended; of the engine: compile,
          disk_read, transfer, queue, admit, prefill, decode, preempt, finish; see TimelineEvent for these and other fields
    """

    kind: str
    start_s: float
    duration_s: float = _NONE
    choice: int = 0
    step: int | None = None
    tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    cached_tokens: int = 0
    host_pages: int = 0
    disk_pages: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    prefill_step_s: float = _NONE
    longest_step_s: float = _NONE
    longest_step: int | None = None
    reason: str = ""


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a request, and where the time went.

    id                   of the request; http_request_id: of its HTTP request (request-id); client_request_id: what the client
                         called that (x-request-id)
    state                queue, prefill, decode, ended
    received_at          seconds since 1970
    total_s              from the arrival to the end; of an unfinished request, until now
    time_to_first_token_s  likewise; None without a token
    summary              a sentence about the phase that took longest
    events               in the order of their starts
    num_dropped_events   that were not recorded because there were too many
    """

    id: str
    http_request_id: str | None
    client_request_id: str | None
    route: str
    priority: str
    replica: int
    state: str
    received_at: float
    total_s: float
    time_to_first_token_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    finish_reasons: list[str]
    abort_reason: str | None
    error: str | None
    summary: str
    phases: list[TimelinePhase]
    events: list[TimelineEntry]
    num_dropped_events: int


class TimelineStep(msgspec.Struct, frozen=True):
    """One step of an engine; started_at: seconds since 1970."""

    replica: int
    step: int
    started_at: float
    duration_s: float
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    free_blocks: int


class RequestTimelines(msgspec.Struct, frozen=True):
    """The requests that an id names: several if an HTTP request had several prompts, or a client used an id again."""

    timelines: list[Timeline]


class KeptTimelines(msgspec.Struct, frozen=True):
    """The kept requests, in the order of their ends, and the last steps of the engines. max_timelines: of ServerConfig."""

    max_timelines: int
    timelines: list[Timeline]
    steps: list[TimelineStep]


def timeline_of(kept: KeptTimeline, offset_s: float) -> Timeline:
    """Return the answer about one request. offset_s: from time.monotonic() to seconds since 1970."""
    seconds = seconds_by_phase(kept)
    total_s = kept.ended_s - kept.arrival_s
    phases = [TimelinePhase(phase, _round(value), round(value / total_s, 4)) for phase, value in seconds.items()]
    first_s = kept.first_output_s
    return Timeline(
        id=kept.request_id,
        http_request_id=kept.call_id,
        client_request_id=kept.client_id,
        route=kept.route,
        priority=kept.priority,
        replica=kept.replica,
        state=kept.phase,
        received_at=_round(kept.arrival_s + offset_s),
        total_s=_round(total_s),
        time_to_first_token_s=None if first_s is None else _round(first_s - kept.arrival_s),
        prompt_tokens=kept.num_prompt_tokens,
        cached_tokens=kept.num_cached_tokens,
        output_tokens=kept.num_output_tokens,
        preemptions=kept.num_preemptions,
        finish_reasons=list(kept.finish_reasons),
        abort_reason=kept.abort_reason,
        error=None if kept.error is None else show_error(kept.error),
        summary=summary_of(kept, seconds),
        phases=phases,
        events=_entries(kept),
        num_dropped_events=kept.num_dropped_events,
    )


def steps_of(steps: Iterable[KeptStep], offset_s: float) -> list[TimelineStep]:
    """Return the answer about steps."""
    return [
        TimelineStep(
            step.replica,
            step.step_id,
            _round(step.started_s + offset_s),
            _round(step.duration_s),
            step.num_prefill_tokens,
            step.num_decode_tokens,
            step.num_running,
            step.num_waiting,
            step.num_free_blocks,
        )
        for step in steps
    ]


def _entries(kept: KeptTimeline) -> list[TimelineEntry]:
    instants = (
        ("received", kept.arrival_s),
        ("queued", kept.opened_s),
        ("dispatched", kept.dispatched_s),
        ("first_token", kept.first_output_s),
        ("last_token", kept.last_output_s),
        ("ended", kept.ended_s if kept.phase == "ended" else None),
    )
    found = [TimelineEntry(kind, _round(at_s - kept.arrival_s)) for kind, at_s in instants if at_s is not None]
    found += [_entry(event, kept.arrival_s) for event in kept.events]
    order = {"received": 0, "ended": 2}
    return sorted(found, key=lambda entry: (order.get(entry.kind, 1), entry.start_s))


def _entry(event: TimelineEvent, origin_s: float) -> TimelineEntry:
    return TimelineEntry(
        kind=event.kind,
        start_s=_round(event.start_s - origin_s),
        duration_s=_round(event.end_s - event.start_s),
        choice=event.choice,
        step=None if event.step_id < 0 else event.step_id,
        tokens=event.num_tokens,
        steps=event.num_steps,
        step_tokens=event.num_step_tokens,
        cached_tokens=event.num_cached_tokens,
        host_pages=event.num_host_pages,
        disk_pages=event.num_disk_pages,
        draft_tokens=event.num_drafts,
        accepted_tokens=event.num_accepted,
        prefill_step_s=_round(event.prefill_step_s),
        longest_step_s=_round(event.longest_step_s),
        longest_step=None if event.longest_step_id < 0 else event.longest_step_id,
        reason=event.reason,
    )


def _round(seconds: float) -> float:
    return round(seconds, 6) or _NONE
