"""Timelines as a trace in Chrome's trace event format, which Perfetto (https://ui.perfetto.dev) opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.serving.metrics.timeline_answers import Timeline, TimelineEntry, TimelineStep

_REQUESTS_PID = 1
_FIRST_ENGINE_PID = 10
_STEPS_TID = 1
_MAX_THREADS = 1000
"""Rows of one request: its choices have numbers below this."""
_NAMES = {
    "queue": "engine queue",
    "compile": "compile constraint",
    "disk_read": "read KV pages from disk",
    "transfer": "KV pages of a prefill engine",
}
_SERVER_INSTANTS = {"queued": "prepare", "dispatched": "server queue"}
"""Instants that end a phase of the server, which began with the instant before."""

TraceEvent = dict[str, Any]


def chrome_trace(timelines: Sequence[Timeline], steps: Sequence[TimelineStep] = ()) -> dict[str, Any]:
    """Return a trace as JSON data.

    The process "requests" has a row for each sequence; each engine is a process with its steps and, as counters, its load.
    Times are microseconds from the earliest event.
    """
    starts = [timeline.received_at for timeline in timelines] + [step.started_at for step in steps]
    origin_s = min(starts, default=0.0)
    events: list[TraceEvent] = [_name("process_name", _REQUESTS_PID, 0, "requests")] if timelines else []
    for number, timeline in enumerate(timelines):
        events += _request_events(timeline, (1 + number) * _MAX_THREADS, (timeline.received_at - origin_s) * 1e6)
    for replica in sorted({step.replica for step in steps}):
        pid = _FIRST_ENGINE_PID + replica
        events += [_name("process_name", pid, 0, f"engine {replica}"), _name("thread_name", pid, _STEPS_TID, "steps")]
    for step in steps:
        events += _step_events(step, (step.started_at - origin_s) * 1e6)
    return {"displayTimeUnit": "ms", "otherData": {"started_at": origin_s}, "traceEvents": events}


def _request_events(timeline: Timeline, first_tid: int, start_us: float) -> list[TraceEvent]:
    whole = {
        "route": timeline.route,
        "state": timeline.state,
        "prompt_tokens": timeline.prompt_tokens,
        "cached_tokens": timeline.cached_tokens,
        "output_tokens": timeline.output_tokens,
        "finish_reasons": timeline.finish_reasons,
        "summary": timeline.summary,
    }
    events = [
        _name("thread_name", _REQUESTS_PID, first_tid, timeline.id),
        _span(timeline.id, _REQUESTS_PID, first_tid, (start_us, timeline.total_s * 1e6), whole),
    ]
    for choice in sorted({entry.choice for entry in timeline.events} - {0}):
        events.append(_name("thread_name", _REQUESTS_PID, first_tid + choice, f"{timeline.id} choice {choice}"))
    last_us = start_us
    for entry in timeline.events:
        at_us, tid = start_us + entry.start_s * 1e6, first_tid + entry.choice
        if entry.kind in _SERVER_INSTANTS:
            events.append(_span(_SERVER_INSTANTS[entry.kind], _REQUESTS_PID, tid, (last_us, at_us - last_us), {}))
            last_us = at_us
        elif entry.kind in ("queue", "compile", "disk_read", "transfer", "prefill", "decode", "preempt"):
            name = _NAMES.get(entry.kind, entry.kind)
            events.append(_span(name, _REQUESTS_PID, tid, (at_us, entry.duration_s * 1e6), _args(entry)))
        elif entry.kind not in ("received", "ended"):
            name = entry.kind.replace("_", " ")
            instant = {"name": name, "ph": "i", "s": "t", "pid": _REQUESTS_PID, "tid": tid, "ts": _us(at_us)}
            events.append({**instant, "args": _args(entry)})
    return events


def _step_events(step: TimelineStep, start_us: float) -> list[TraceEvent]:
    pid = _FIRST_ENGINE_PID + step.replica
    num_tokens = {"prefill_tokens": step.prefill_tokens, "decode_tokens": step.decode_tokens}
    kind = "prefill and decode" if all(num_tokens.values()) else "prefill" if step.prefill_tokens else "decode"
    counters = {
        "sequences": {"running": step.running, "waiting": step.waiting},
        "tokens": num_tokens,
        "free KV blocks": {"free": step.free_blocks},
    }
    return [
        _span(kind, pid, _STEPS_TID, (start_us, step.duration_s * 1e6), {"step": step.step, **num_tokens}),
        *(
            {"name": name, "ph": "C", "pid": pid, "tid": 0, "ts": _us(start_us), "args": values}
            for name, values in counters.items()
        ),
    ]


def _span(name: str, pid: int, tid: int, times_us: tuple[float, float], args: dict[str, Any]) -> TraceEvent:
    start_us, duration_us = times_us
    return {
        "name": name,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": _us(start_us),
        "dur": _us(max(0.0, duration_us)),
        "args": args,
    }


def _name(kind: str, pid: int, tid: int, name: str) -> TraceEvent:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _args(entry: TimelineEntry) -> dict[str, Any]:
    return {
        name: value
        for name, value in msgspec.to_builtins(entry).items()
        if name not in ("kind", "start_s", "duration_s", "choice")
    }


def _us(microseconds: float) -> float:
    return round(microseconds, 3)
