"""Spans and log lines of ended requests."""

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from quire.base.errors import ConfigError
from quire.contracts.outputs import RequestMetrics
from quire.contracts.timeline import RequestTimeline, TimelineEvent
from quire.serving.engine_client.engine_process import EngineLog
from quire.serving.log_format import JsonFormatter, setup_log_format
from quire.serving.metrics.otlp_exporter import OtlpExporter
from quire.serving.metrics.request_record import RequestRecord, log_ended
from quire.serving.metrics.tracing import RequestTracing, TraceParent, parse_traceparent
from tests.ranks import wait_until
from tests.unit.serving.request_queue.virtual_engine import make_job

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def make_record(**job):
    record = RequestRecord(make_job("req_1", 10, 20, owner="team", **job), arrival_s=99.0, opened_s=99.5, dispatched_s=100.0)
    record.first_output_s, record.last_output_s, record.ended_s = 101.0, 103.0, 103.0
    record.engine = RequestMetrics(99.0, 100.5, 101.0, 103.0, num_cached_tokens=4)
    record.num_output_tokens, record.choice_tokens, record.finish_reasons = 5, {0: 5}, ["stop"]
    return record


@pytest.fixture
def collector():
    """Yield (url, requests, statuses): what came as (path, headers, spans); the statuses that are answered next, else 200."""
    requests, statuses = [], []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status = statuses.pop(0) if statuses else 200
            (resource,) = body["resourceSpans"]
            (scope,) = resource["scopeSpans"]
            if status == 200:
                requests.append((self.path, dict(self.headers), resource["resource"], scope["spans"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            return

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests, statuses
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def traced(collector):
    url, requests, _ = collector

    def run(*records):
        tracing = RequestTracing(url, "demo", clock=lambda: 103.0)
        for record in records:
            tracing.record_ended(record)
        tracing.close()
        return [span for _, _, _, spans in requests for span in spans]

    return run


def values_of(attributes):
    """Return attributes in the JSON form of OTLP as a dict."""

    def value_of(value):
        ((kind, found),) = value.items()
        if kind == "arrayValue":
            return [value_of(one) for one in found["values"]]
        return int(found) if kind == "intValue" else found

    return {attribute["key"]: value_of(attribute["value"]) for attribute in attributes}


def seconds_of(span):
    return (int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) / 1e9


def test_span_has_times_and_counts_when_a_request_ends(traced):
    span, *_ = traced(make_record())
    assert (span["name"], span["kind"]) == ("text_completion demo", 2)
    assert seconds_of(span) == pytest.approx(4.0)
    attributes = values_of(span["attributes"])
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.usage.input_tokens"] == 10
    assert attributes["gen_ai.usage.output_tokens"] == 5
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 4
    assert attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(2.0)
    assert attributes["gen_ai.latency.time_in_queue"] == pytest.approx(1.5)
    start = int(span["startTimeUnixNano"])
    offsets = {event["name"]: (int(event["timeUnixNano"]) - start) / 1e9 for event in span["events"]}
    assert offsets == pytest.approx(
        {"admitted": 0.5, "dispatched": 1, "first_step": 1.5, "first_token": 2, "last_token": 4}, abs=1e-6
    )
    assert abs(start / 1e9 + 4.0 - time.time()) < 60


def test_phases_are_children_of_the_span(traced):
    record = make_record()
    record.engine.timeline = RequestTimeline(
        [
            TimelineEvent("queue", 0, 100.0, 100.5),
            TimelineEvent("admit", 0, 100.5, 100.5),
            TimelineEvent("prefill", 0, 100.5, 101.0, step_id=7, num_tokens=6, num_steps=1),
            TimelineEvent("decode", 0, 101.0, 103.0, num_tokens=4, num_steps=3, num_drafts=2, num_accepted=1),
            TimelineEvent("finish", 0, 103.0, 103.0),
        ]
    )
    root, *children = traced(record)
    assert {child["parentSpanId"] for child in children} == {root["spanId"]}
    assert {child["traceId"] for child in children} == {root["traceId"]}
    assert {child["name"]: seconds_of(child) for child in children} == pytest.approx(
        {"quire.prepare": 0.5, "quire.server_queue": 0.5, "quire.engine_queue": 0.5, "quire.prefill": 0.5, "quire.decode": 2.0}
    )
    by_name = {child["name"]: child for child in children}
    (chunk,) = by_name["quire.prefill"]["events"]
    assert values_of(chunk["attributes"]) == {"quire.step": 7, "quire.tokens": 6, "quire.duration_s": 0.5}
    decode = values_of(by_name["quire.decode"]["attributes"])
    assert decode == {
        "quire.choice": 0, "quire.tokens": 4, "quire.steps": 3, "quire.draft_tokens": 2, "quire.accepted_tokens": 1,
    }  # fmt: skip


def test_span_continues_the_clients_trace_when_it_sends_a_traceparent(traced):
    span, *_ = traced(make_record(traceparent=PARENT))
    assert (span["traceId"], span["parentSpanId"]) == tuple(PARENT.split("-")[1:3])


def test_no_span_is_made_when_the_client_does_not_sample(traced):
    assert traced(make_record(traceparent=PARENT[:-1] + "0")) == []


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "header",
    ["", "x", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\x00" * 100, f"{PARENT}-more", f"ff{PARENT[2:]}", PARENT.upper()],
)
def test_span_begins_a_trace_when_the_traceparent_is_invalid(traced, header):
    span, *_ = traced(make_record(traceparent=header))
    assert "parentSpanId" not in span
    assert span["traceId"] != PARENT.split("-")[1]


def test_traceparent_of_a_later_version_may_have_more():
    assert parse_traceparent(f"01{PARENT[2:]}-more") == TraceParent(*PARENT.split("-")[1:3], is_sampled=True)


def test_error_status_is_set_when_a_request_failed(traced):
    record = make_record()
    record.error = "broken"
    span, *_ = traced(record)
    assert span["status"] == {"code": 2, "message": "broken"}


def test_spans_go_to_the_collector_with_the_headers_and_the_resource_of_the_environment(collector, monkeypatch):
    url, requests, _ = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=a%20b, x-other=1")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,service.name=ignored")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracing = RequestTracing(url, "demo")
    tracing.record_ended(make_record())
    tracing.close()
    ((path, headers, resource, _),) = requests
    headers = {name.lower(): value for name, value in headers.items()}
    assert (path, headers["content-type"]) == ("/v1/traces", "application/json")
    assert (headers["x-token"], headers["x-other"]) == ("a b", "1")
    found = values_of(resource["attributes"])
    assert (found["service.name"], found["deployment.environment"]) == ("mine", "test")
    assert (tracing.exporter.num_sent, tracing.exporter.num_dropped) == (1, 0)


def test_spans_are_sent_again_once_when_the_collector_is_busy(collector, monkeypatch):
    monkeypatch.setattr("quire.serving.metrics.otlp_exporter._RETRY_DELAY_S", 0.01)
    monkeypatch.setattr("quire.serving.metrics.otlp_exporter._BATCH_DELAY_S", 0.01)
    url, requests, statuses = collector
    statuses.append(503)
    exporter = OtlpExporter(url)
    exporter.offer(lambda: [{"name": "a"}])
    assert wait_until(lambda: exporter.num_sent)
    exporter.close()
    assert len(requests) == 1
    assert (exporter.num_sent, exporter.num_dropped) == (1, 0)


def test_spans_that_the_collector_does_not_take_are_counted_and_logged(collector, caplog):
    url, requests, statuses = collector
    statuses += [400, 400]
    exporter = OtlpExporter(url)
    with caplog.at_level(logging.WARNING, logger="quire"):
        exporter.offer(lambda: [{"name": "a"}])
        exporter.close()
    assert (requests, exporter.num_sent, exporter.num_dropped) == ([], 0, 1)
    assert "status 400" in caplog.text


@pytest.mark.slow
def test_exporter_goes_on_when_the_collector_speaks_no_http(caplog):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            for _ in range(2):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(bytes(12) + b"\r\n")  # as a server of gRPC does

        thread = threading.Thread(target=answer)
        thread.start()
        exporter = OtlpExporter(f"http://127.0.0.1:{listening.getsockname()[1]}")
        with caplog.at_level(logging.WARNING, logger="quire"):
            for num_dropped in (1, 2):
                exporter.offer(lambda: [{"name": "a"}])
                assert wait_until(lambda num_dropped=num_dropped: exporter.num_dropped == num_dropped)
        exporter.close()
        thread.join(30)
    assert "BadStatusLine" in caplog.text


def test_requests_are_dropped_and_counted_when_the_queue_is_full():
    blocked, entered = threading.Event(), threading.Event()

    def wait():
        entered.set()
        blocked.wait(60)
        return []

    exporter = OtlpExporter("http://127.0.0.1:1", max_queued=2)
    exporter.offer(wait)
    assert entered.wait(60)
    for _ in range(5):
        exporter.offer(list)
    assert exporter.num_dropped == 3
    blocked.set()
    exporter.close()


@pytest.mark.parametrize("endpoint", ["collector:4318", "", "ftp://x"])
def test_config_error_is_raised_when_the_endpoint_is_no_url(endpoint):
    with pytest.raises(ConfigError, match="http://"):
        RequestTracing(endpoint, "demo")


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_HEADERS", "OTEL_RESOURCE_ATTRIBUTES"])
def test_config_error_names_the_variable_and_not_the_secret(monkeypatch, variable):
    monkeypatch.setenv(variable, "sk-secret")
    with pytest.raises(ConfigError, match=variable) as error:
        RequestTracing("http://127.0.0.1:4318", "demo")
    assert "secret" not in str(error.value)


def test_line_is_json_without_contents_when_a_request_ends(caplog):
    with caplog.at_level(logging.INFO, logger="quire"):
        log_ended(make_record())
    (found,) = caplog.records
    found.prompt, found.authorization = "secret prompt", "Bearer secret"
    line = json.loads(JsonFormatter().format(found))
    assert "secret" not in json.dumps(line)
    expected = {"request_id": "req_1", "route": "/v1/completions", "owner": "team", "num_prompt_tokens": 10,
                "num_output_tokens": 5, "num_cached_tokens": 4, "duration_s": 4.0, "ttft_s": 2.0, "queue_s": 1.5,
                "time_per_output_token_s": 0.5, "finish_reasons": ["stop"], "level": "INFO"}  # fmt: skip
    assert {name: line[name] for name in expected} == expected
    assert "\n" not in JsonFormatter().format(found)


def test_line_stays_one_line_when_there_is_an_exception_or_odd_value():
    try:
        raise ValueError("bad\nthing")
    except ValueError:
        record = logging.LogRecord("quire.x", logging.ERROR, "f", 1, "line one\nline two", (), sys.exc_info())
    record.route = object()
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert "ValueError" in json.loads(text)["exception"]


def test_handlers_get_the_format_when_it_is_json():
    logger, handler, root = logging.getLogger("quire"), logging.NullHandler(), logging.getLogger()
    logger.addHandler(handler)
    others, hooks = list(root.handlers), (sys.excepthook, threading.excepthook)
    try:
        setup_log_format("text")
        assert handler.formatter is None
        setup_log_format("json")
        assert isinstance(handler.formatter, JsonFormatter)
    finally:
        logger.removeHandler(handler)
        logging.captureWarnings(False)
        root.handlers[:] = others
        sys.excepthook, threading.excepthook = hooks


def test_every_line_of_the_engine_is_one_object_when_some_are_written_below_python(capsys, caplog):
    own = json.dumps({"time": "t", "level": "INFO", "logger": "quire.x", "message": "a", "request_id": "req_1"})
    odd = ["panicked at 'x'", '{"half', '{"level": 1}', "[1]", "\xff", " "]
    reading, writing = os.pipe()
    log = EngineLog(os.fdopen(reading, "rb"))
    with caplog.at_level(logging.WARNING, logger="quire"), os.fdopen(writing, "wb") as pipe:
        pipe.write(f"{own}\n".encode() + "\n".join(odd).encode("latin-1") + b"\n" + b"x" * 70_000 + b"\nno end")
        pipe.close()
        log.join(60)
    assert capsys.readouterr().err == f"{own}\n"
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [*odd[:4], "\ufffd", "x" * 65_536, "x" * (70_000 - 65_536), "no end"]
    assert {record.name for record in caplog.records} == {"quire.engine.output"}


@pytest.mark.parametrize(
    ("code", "logger", "told"),
    [
        ("raise ValueError('bad')", "quire.serving.log_format", "ValueError"),
        ("threading.Thread(target=int, args=('x',)).start()", "quire.serving.log_format", "ValueError"),
        ("warnings.warn('old\\nthing')", "py.warnings", "old"),
        ("logging.getLogger('another').warning('a\\nb')", "another", "a\\nb"),
        ("logging.getLogger('quire.x').warning('once')", "quire.x", "once"),
    ],
)
def test_every_line_is_one_object_when_others_write_to_the_log(code, logger, told):
    begin = (
        "import logging, threading, warnings; from quire.base.logging import setup_logging; setup_logging();"
        "from quire.serving.log_format import setup_log_format; setup_log_format('json')\n"
    )
    done = subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True, timeout=120)
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["logger"] == logger
    assert told in line
