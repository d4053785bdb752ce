"""Spans and log lines of ended requests."""

import json
import logging
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from quire.base.errors import ConfigError
from quire.contracts.outputs import RequestMetrics
from quire.serving.engine_client.engine_process import EngineLog
from quire.serving.log_format import JsonFormatter, setup_log_format
from quire.serving.metrics.request_record import RequestRecord, log_ended
from quire.serving.metrics.tracing import RequestTracing
from tests.unit.serving.request_queue.virtual_engine import make_job

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def make_record(**job):
    record = RequestRecord(make_job("req_1", 10, 20, owner="team", **job), arrival_s=99.0, opened_s=99.5, dispatched_s=100.0)
    record.first_output_s, record.last_output_s, record.ended_s = 101.0, 103.0, 103.0
    record.engine = RequestMetrics(99.0, 100.5, 101.0, 103.0, num_cached_tokens=4)
    record.num_output_tokens, record.choice_tokens, record.finish_reasons = 5, {0: 5}, ["stop"]
    return record


@pytest.fixture
def traced():
    sdk = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="the extra otel is not installed"
    )
    exporter = sdk.InMemorySpanExporter()

    def run(*records):
        tracing = RequestTracing("http://127.0.0.1:4318", "demo", clock=lambda: 103.0, exporter=exporter)
        for record in records:
            tracing.record_ended(record)
        tracing._provider.force_flush()
        return exporter.get_finished_spans()

    return run


def test_span_has_times_and_counts_when_a_request_ends(traced):
    (span,) = traced(make_record())
    assert span.name == "text_completion demo"
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(4.0)
    assert span.attributes["gen_ai.usage.input_tokens"] == 10
    assert span.attributes["gen_ai.usage.output_tokens"] == 5
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert span.attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(2.0)
    assert span.attributes["gen_ai.latency.time_in_queue"] == pytest.approx(1.5)
    offsets = {event.name: (event.timestamp - span.start_time) / 1e9 for event in span.events}
    assert offsets == pytest.approx(
        {"admitted": 0.5, "dispatched": 1, "first_step": 1.5, "first_token": 2, "last_token": 4}, abs=1e-6
    )


def test_span_continues_the_clients_trace_when_it_sends_a_traceparent(traced):
    (span,) = traced(make_record(traceparent=PARENT))
    assert format(span.context.trace_id, "032x") == PARENT.split("-")[1]
    assert format(span.parent.span_id, "016x") == PARENT.split("-")[2]


def test_no_span_is_made_when_the_client_does_not_sample(traced):
    assert traced(make_record(traceparent=PARENT[:-1] + "0")) == ()


@pytest.mark.parametrize("header", ["", "x", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\x00" * 100])
def test_span_begins_a_trace_when_the_traceparent_is_invalid(traced, header):
    (span,) = traced(make_record(traceparent=header))
    assert span.parent is None


def test_error_status_is_set_when_a_request_failed(traced):
    record = make_record()
    record.error = "broken"
    (span,) = traced(record)
    assert not span.status.is_ok
    assert span.status.description == "broken"


def test_spans_arrive_over_http_when_an_endpoint_is_given():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    paths = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            return

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        tracing = RequestTracing(f"http://127.0.0.1:{server.server_port}", "demo")
        tracing.record_ended(make_record())
        tracing.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert paths == ["/v1/traces"]


def test_config_error_names_the_extra_when_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"quire\[otel\]"):
        RequestTracing("http://127.0.0.1:4318", "demo")


def test_config_error_is_raised_when_the_endpoint_is_no_url():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    with pytest.raises(ConfigError, match="http://"):
        RequestTracing("collector:4318", "demo")


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
