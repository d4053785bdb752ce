"""OtlpExporter: sends spans to an OpenTelemetry collector as OTLP/JSON over HTTP, in a thread, without any library."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import unquote
from urllib.request import Request, urlopen

import msgspec

import quire
from quire.base.errors import ConfigError
from quire.base.logging import get_logger

logger = get_logger(__name__)

Span = dict[str, Any]
"""A span in the JSON form of OTLP."""

MAX_QUEUED = 2048
_MAX_BATCH = 256
_BATCH_DELAY_S = 1.0
_TIMEOUT_S = 10.0
_RETRY_DELAY_S = 1.0
_RETRYABLE = (429, 502, 503, 504)
_LOG_INTERVAL_S = 60.0


class OtlpExporter:
    """Takes the spans of one request at a time, without waiting; those for which the queue has no room are dropped and counted.

    The environment variables OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_HEADERS and
    OTEL_EXPORTER_OTLP_TRACES_HEADERS mean what OpenTelemetry says.

    endpoint     http:// or https:// URL of a collector, with or without /v1/traces
    num_sent, num_dropped  requests since the start; dropped: the queue was full, or the collector did not take them
    """

    def __init__(self, endpoint: str, max_queued: int = MAX_QUEUED, environment: Mapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        self._url = _traces_url(endpoint)
        self._headers = {"content-type": "application/json", **_headers_of(environment)}
        self._resource = {"attributes": to_attributes(_resource_of(environment))}
        self._queue: queue.Queue[Callable[[], list[Span]] | None] = queue.Queue(max_queued)
        self.num_sent = self.num_dropped = 0
        self._last_log_s = -_LOG_INTERVAL_S
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="quire-otlp", daemon=True)
        self._thread.start()

    def offer(self, make_spans: Callable[[], list[Span]]) -> None:
        """Export the spans of one request, which a function returns that is called in the thread."""
        try:
            self._queue.put_nowait(make_spans)
        except queue.Full:
            self.num_dropped += 1

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is queued, for a few seconds at most, and stop."""
        self._is_closing = True
        deadline_s = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            try:
                self._queue.put(None, timeout=0.1)
                break
            except queue.Full:
                continue
        self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch, is_open = self._take_batch()
            made = [spans for spans in map(self._made, batch) if spans]
            if made:
                self._export([span for spans in made for span in spans], len(made))

    def _take_batch(self) -> tuple[list[Callable[[], list[Span]]], bool]:
        """Return the requests of the next second, and whether more may follow."""
        batch: list[Callable[[], list[Span]]] = []
        first = self._queue.get()
        if first is None:
            return batch, False
        batch.append(first)
        deadline_s = time.monotonic() + _BATCH_DELAY_S
        while len(batch) < _MAX_BATCH and (left_s := deadline_s - time.monotonic()) > 0:
            try:
                following = self._queue.get(timeout=0.001 if self._is_closing else left_s)
            except queue.Empty:
                break
            if following is None:
                return batch, False
            batch.append(following)
        return batch, True

    def _made(self, make_spans: Callable[[], list[Span]]) -> list[Span]:
        try:
            return make_spans()
        except Exception:
            logger.exception("the spans of a request could not be made")
            self.num_dropped += 1
            return []

    def _export(self, spans: list[Span], num_requests: int) -> None:
        scope = {"name": "quire.serving", "version": quire.__version__}
        body = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [{"scope": scope, "spans": spans}]}]}
        data = msgspec.json.encode(body)
        error = self._post(data)
        if error is not None and error[1] and not self._is_closing:
            time.sleep(_RETRY_DELAY_S)
            error = self._post(data)
        if error is None:
            self.num_sent += num_requests
            return
        self.num_dropped += num_requests
        if time.monotonic() - self._last_log_s >= _LOG_INTERVAL_S:
            self._last_log_s = time.monotonic()
            logger.warning("the spans of %d requests could not be sent to %s: %s", num_requests, self._url, error[0])

    def _post(self, data: bytes) -> tuple[str, bool] | None:
        """Send a body; return None, or why it was not taken and whether a retry may help."""
        try:
            with urlopen(Request(self._url, data, self._headers), timeout=_TIMEOUT_S) as answer:
                answer.read()
            return None
        except HTTPError as error:
            return f"status {error.code}", error.code in _RETRYABLE
        except OSError as error:
            return str(error), True
        except (HTTPException, ValueError) as error:  # no HTTP/1.1, as at a port for gRPC; a header that cannot be sent
            return f"{type(error).__name__}: {error}", False


def to_attributes(values: Mapping[str, object]) -> list[dict[str, Any]]:
    """Return attributes in the JSON form of OTLP; those that are None are left out."""
    return [{"key": name, "value": _to_value(value)} for name, value in values.items() if value is not None]


def _to_value(value: object) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list | tuple):
        return {"arrayValue": {"values": [_to_value(item) for item in value]}}
    return {"stringValue": str(value)}


def _traces_url(endpoint: str) -> str:
    """Return the URL for spans: an endpoint without a path is a collector, and gets the standard path."""
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"otlp_endpoint must begin with http:// or https://, got {endpoint!r}")
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"


def _pairs_of(variable: str, text: str) -> dict[str, str]:
    """Return the pairs of name=value,name=value, with percent-encoded values. Raises ConfigError."""
    found: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = pair.partition("=")
        if not separator or not name.strip():
            raise ConfigError(f"{variable} must be name=value pairs with commas between them; one of them has no name or no =")
        found[name.strip()] = unquote(value.strip())
    return found


def _headers_of(environment: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for variable in ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"):
        found |= _pairs_of(variable, environment.get(variable, ""))
    return found


def _resource_of(environment: Mapping[str, str]) -> dict[str, str]:
    stated = _pairs_of("OTEL_RESOURCE_ATTRIBUTES", environment.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    name = environment.get("OTEL_SERVICE_NAME") or stated.get("service.name") or "quire"
    return {**stated, "service.name": name, "service.version": quire.__version__}
