"""Spans: one per request, made at its end from the times in its record, and sent by OTLP over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.base.errors import ConfigError
from quire.serving.metrics.request_record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/pooling": "embeddings",
}
Attributes = dict[str, str | int | float | list[str]]


class RequestTracing:
    """Makes a span of every ended request: register `record_ended` with ServerMetrics.on_end, and call `close` at the end.

    The span continues the trace of the client's W3C traceparent if it is valid, and honours its sampling flag.
    Spans are sent in batches by a thread; they contain no prompts or answers. Raises ConfigError if the
    packages of the extra `otel` are not installed.

    exporter  instead of the one for `endpoint`, for tests
    """

    def __init__(
        self,
        endpoint: str,
        model_name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        exporter: SpanExporter | None = None,
    ) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"otlp_endpoint needs the packages of the extra 'otel' ({error}): pip install 'quire[otel]', or leave it out"
            ) from error
        self._model_name = model_name
        self._clock = clock
        self._kind = SpanKind.SERVER
        self._status_of: Callable[[str], Status] = lambda message: Status(StatusCode.ERROR, message)
        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=Resource.create({"service.name": "quire"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=_traces_url(endpoint))))
        self._tracer = self._provider.get_tracer("quire.serving")

    def record_ended(self, record: RequestRecord) -> None:
        """Make the span of an ended request."""
        offset_s = time.time() - self._clock()

        def wall_ns(seconds: float) -> int:
            return int((seconds + offset_s) * 1e9)

        carrier = {} if record.job.traceparent is None else {"traceparent": record.job.traceparent}
        operation = _OPERATIONS.get(record.job.route, "generate")
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            context=self._propagator.extract(carrier),
            kind=self._kind,
            start_time=wall_ns(record.arrival_s),
            attributes=self._attributes(record, operation),
        )
        for name, seconds in _events(record):
            span.add_event(name, timestamp=wall_ns(seconds))
        if record.error is not None:
            span.set_status(self._status_of(record.error))
        span.end(end_time=wall_ns(record.arrival_s if record.ended_s is None else record.ended_s))

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most, and stop."""
        self._provider.force_flush(timeout_millis=5000)
        self._provider.shutdown()

    def _attributes(self, record: RequestRecord, operation: str) -> Attributes:
        request, engine = record.job.request, record.engine
        optional: dict[str, str | int | float | None] = {
            "gen_ai.request.max_tokens": request.params.max_tokens,
            "gen_ai.latency.time_to_first_token": record.ttft_s,
            "gen_ai.latency.e2e": record.e2e_s,
            "gen_ai.latency.time_in_queue": None if engine is None else engine.time_in_queue_s,
            "gen_ai.latency.time_in_model_decode": None if engine is None else engine.decode_time_s,
            "quire.abort_reason": record.abort_reason,
            "gen_ai.usage.cache_read.input_tokens": None if engine is None else engine.num_cached_tokens,
        }
        return {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.id": request.request_id,
            "gen_ai.request.choice.count": request.params.n,
            "gen_ai.request.temperature": request.params.temperature,
            "gen_ai.request.top_p": request.params.top_p,
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.output_tokens": record.num_output_tokens,
            "gen_ai.response.finish_reasons": list(record.finish_reasons),
            "http.route": record.job.route,
            "quire.priority": record.job.priority,
            **{name: value for name, value in optional.items() if value is not None},
        }


def _events(record: RequestRecord) -> list[tuple[str, float]]:
    engine = record.engine
    found = [
        ("admitted", record.opened_s),
        ("dispatched", record.dispatched_s),
        ("first_step", None if engine is None else engine.first_scheduled_time),
        ("first_token", record.first_output_s),
        ("last_token", record.last_output_s),
    ]
    return [(name, seconds) for name, seconds in found if seconds is not None]


def _traces_url(endpoint: str) -> str:
    """Return the URL for spans: an endpoint without a path is a collector, and gets the standard path."""
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"otlp_endpoint must begin with http:// or https://, got {endpoint!r}")
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"
