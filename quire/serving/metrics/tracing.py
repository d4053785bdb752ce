"""Spans: one per request and one per phase of it, made at its end, and sent by OTLP over HTTP."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from quire.contracts.timeline import TimelineEvent
from quire.serving.metrics.otlp_exporter import OtlpExporter, Span, to_attributes
from quire.serving.metrics.phases import spans_of
from quire.serving.metrics.request_record import RequestRecord
from quire.serving.metrics.timelines import KeptTimeline

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/pooling": "embeddings",
}
_INTERNAL, _SERVER = 1, 2
_ERROR = 2
_SAMPLED = 1
_MAX_CHUNKS = 128
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
Attributes = dict[str, str | int | float | list[str] | None]


class TraceParent(NamedTuple):
    """A W3C traceparent: ids in lower-case hexadecimal digits, and whether the client records the trace."""

    trace_id: str
    span_id: str
    is_sampled: bool


def parse_traceparent(header: str | None) -> TraceParent | None:
    """Return what a traceparent header says; None if there is none, or it is invalid, so that a new trace begins."""
    found = None if header is None else _TRACEPARENT.fullmatch(header.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more is not None) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceParent(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


class RequestTracing:
    """Makes the spans of every ended request: register `record_ended` with ServerMetrics.on_end, and call `close` at the end.

    The span of a request continues the trace of the client's W3C traceparent if it is valid, and honours its sampling flag; it
    is named and described by the semantic conventions for generative AI. The phases of the request are its children.
    Spans are made and sent by a thread; they contain no prompts or answers. Raises ConfigError for an endpoint that is no URL.
    """

    def __init__(self, endpoint: str, model_name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.exporter = OtlpExporter(endpoint)
        self._model_name = model_name
        self._clock = clock

    def record_ended(self, record: RequestRecord) -> None:
        """Export the spans of an ended request."""
        parent = parse_traceparent(record.job.traceparent)
        if parent is not None and not parent.is_sampled:
            return
        offset_s = time.time() - self._clock()
        kept = KeptTimeline.of(record, record.arrival_s)
        operation = _OPERATIONS.get(record.job.route, "generate")
        attributes = self._attributes(record, operation)
        name = f"{operation} {self._model_name}"
        first_scheduled_s = None if record.engine is None else record.engine.first_scheduled_time
        events = [
            ("admitted", record.opened_s),
            ("dispatched", record.dispatched_s),
            ("first_step", first_scheduled_s),
            ("first_token", record.first_output_s),
            ("last_token", record.last_output_s),
        ]
        times = [(what, at_s) for what, at_s in events if at_s is not None]
        self.exporter.offer(lambda: make_spans(name, kept, attributes, times, parent, offset_s))

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most, and stop."""
        self.exporter.close()

    def _attributes(self, record: RequestRecord, operation: str) -> Attributes:
        request, engine = record.job.request, record.engine
        return {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.id": request.request_id,
            "gen_ai.request.choice.count": request.params.n,
            "gen_ai.request.temperature": request.params.temperature,
            "gen_ai.request.top_p": request.params.top_p,
            "gen_ai.request.max_tokens": request.params.max_tokens,
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.output_tokens": record.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": None if engine is None else engine.num_cached_tokens,
            "gen_ai.response.finish_reasons": list(record.finish_reasons),
            "gen_ai.latency.time_to_first_token": record.ttft_s,
            "gen_ai.latency.e2e": record.e2e_s,
            "gen_ai.latency.time_in_queue": None if engine is None else engine.time_in_queue_s,
            "gen_ai.latency.time_in_model_decode": None if engine is None else engine.decode_time_s,
            "error.type": None if record.error is None else (record.abort_reason or "error"),
            "http.route": record.job.route,
            "quire.priority": record.job.priority,
            "quire.http_request_id": record.job.call_id,
            "quire.num_preemptions": None if engine is None else engine.num_preemptions,
            "quire.abort_reason": record.abort_reason,
        }


def make_spans(
    name: str,
    kept: KeptTimeline,
    attributes: Attributes,
    events: list[tuple[str, float]],
    parent: TraceParent | None,
    offset_s: float,
) -> list[Span]:
    """Return the span of a request and those of its phases. offset_s: from time.monotonic() to seconds since 1970."""
    trace_id = secrets.token_hex(16) if parent is None else parent.trace_id
    root: Span = {
        **_span(trace_id, name, (kept.arrival_s, kept.ended_s), offset_s),
        "kind": _SERVER,
        "attributes": to_attributes(attributes),
        "events": [_event(what, at_s, offset_s) for what, at_s in events],
    }
    if parent is not None:
        root["parentSpanId"] = parent.span_id
    if kept.error is not None:
        root["status"] = {"code": _ERROR, "message": kept.error}
    spans = [root]
    for phase, choice, start_s, end_s in spans_of(kept):
        inside = [event for event in kept.events if event.choice == choice and start_s <= event.start_s <= end_s]
        chunks = [event for event in inside if event.kind == "prefill"] if phase in ("prefill", "recompute") else []
        own = next((event for event in inside if phase == event.kind == "decode"), None)
        child: Span = {
            **_span(trace_id, f"quire.{phase}", (start_s, end_s), offset_s),
            "parentSpanId": root["spanId"],
            "kind": _INTERNAL,
            "attributes": to_attributes({"quire.choice": choice, **_decode_attributes(own)}),
            "events": [_event("chunk", chunk.start_s, offset_s, _chunk_attributes(chunk)) for chunk in chunks[:_MAX_CHUNKS]],
        }
        spans.append(child)
    return spans


def _decode_attributes(event: TimelineEvent | None) -> Attributes:
    if event is None:
        return {}
    return {
        "quire.tokens": event.num_tokens,
        "quire.steps": event.num_steps,
        "quire.draft_tokens": event.num_drafts,
        "quire.accepted_tokens": event.num_accepted,
    }


def _chunk_attributes(chunk: TimelineEvent) -> Attributes:
    return {"quire.step": chunk.step_id, "quire.tokens": chunk.num_tokens, "quire.duration_s": chunk.end_s - chunk.start_s}


def _span(trace_id: str, name: str, times_s: tuple[float, float], offset_s: float) -> Span:
    start_s, end_s = times_s
    return {
        "traceId": trace_id,
        "spanId": secrets.token_hex(8),
        "name": name,
        "startTimeUnixNano": _nanoseconds(start_s + offset_s),
        "endTimeUnixNano": _nanoseconds(max(start_s, end_s) + offset_s),
    }


def _event(name: str, at_s: float, offset_s: float, attributes: Attributes | None = None) -> Span:
    return {"name": name, "timeUnixNano": _nanoseconds(at_s + offset_s), "attributes": to_attributes(attributes or {})}


def _nanoseconds(seconds: float) -> str:
    return str(int(seconds * 1e9))
