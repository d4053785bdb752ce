"""`quire explain` against a server that answers as it is told."""

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest

from quire.cli.explain import describe, describe_list
from quire.cli.main import main
from quire.router.autoscale_source import PrometheusSource, SourceError
from quire.serving.metrics.timeline_answers import KeptTimelines, RequestTimelines, timeline_of
from tests.unit.serving.metrics.test_timelines import PLAIN, PREEMPTED, kept_of


@pytest.fixture
def server():
    """Yield (url, answers, requests): answers by path, (status, JSON data)."""
    answers, requests = {}, []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append((self.path, self.headers.get("authorization")))
            status, data = answers[self.path]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data if isinstance(data, bytes) else msgspec.json.encode(data))

        def log_message(self, *_):
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", answers, requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_request_is_explained_with_its_phases_and_events(server, capsys):
    url, answers, requests = server
    answers["/v1/requests/req%2F1/timeline"] = 200, RequestTimelines([timeline_of(kept_of(), 0.0)])
    assert main(["explain", "req/1", "--base-url", f"{url}/v1/", "--api-key", "secret"]) == 0
    assert requests == [("/v1/requests/req%2F1/timeline", "Bearer secret")]
    shown = capsys.readouterr().out
    for text in (
        "/v1/completions, ended (length): 10 prompt tokens (4 cached), 5 output tokens",
        "7.25 s in all, first token after 3.10 s",
        "55% of the time (4.00 s) was spent generating tokens: 4 tokens in 4 steps of 1.00 s.",
        "55.2%     4.00 s  #################",
        "2500.0 ms  admitted: 6 tokens to compute, 4 tokens cached",
        "2500.0 ms  prefill: 6 tokens in 500.0 ms (step 7)",
        "3000.0 ms  decode: 4 tokens in 4.00 s, 4 steps from 8, the longest 1.50 s (step 9)",
        "7000.0 ms  finished: length, 5 output tokens",
    ):
        assert text in shown, shown


def test_preemptions_drafts_and_pages_are_told():
    run = PLAIN[3]._replace(num_drafts=6, num_accepted=3, prefill_step_s=0.5)
    admit = PLAIN[1]._replace(num_host_pages=2, num_disk_pages=1)
    shown = describe(timeline_of(kept_of(events=[PLAIN[0], admit, *PREEMPTED[4:], run]), 0.0))
    assert "4 tokens cached (2 KV pages from the host, 1 KV pages from disk)" in shown
    assert "preempted for 3.00 s: kv_blocks" in shown
    assert "500.0 ms in steps with prompts of others, 3 of 6 draft tokens accepted" in shown


def test_long_timelines_are_cut_in_the_middle():
    chunks = [PLAIN[2]._replace(step_id=number) for number in range(200)]
    lines = describe(timeline_of(kept_of(events=chunks), 0.0)).splitlines()
    assert len(lines) < 80
    assert any("more: --json has all" in line for line in lines)


def test_choices_are_told_apart():
    shown = describe(timeline_of(kept_of(events=[*PLAIN, *(event._replace(choice=1) for event in PLAIN)]), 0.0))
    assert "[1] decode: 4 tokens" in shown


def test_requests_are_listed_and_a_trace_is_written(server, tmp_path, capsys):
    url, answers, _ = server
    answers["/v1/requests/timelines"] = 200, KeptTimelines(256, [timeline_of(kept_of(), 0.0)], [])
    path = tmp_path / "trace.json"
    assert main(["explain", "--base-url", url, "--chrome-trace", str(path)]) == 0
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert {"req_1", "decode", "prefill"} <= names
    shown = capsys.readouterr().out
    assert "decode 55%" in shown
    assert "the last 256 ended requests are kept, and 1 are known" in shown


def test_empty_list_says_so():
    assert describe_list(KeptTimelines(16, [], [])) == "the last 16 ended requests are kept, and 0 are known"


def test_json_is_what_the_server_said(server, capsys):
    url, answers, _ = server
    answers["/v1/requests/a/timeline"] = 200, RequestTimelines([timeline_of(kept_of(), 0.0)])
    assert main(["explain", "a", "--base-url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["timelines"][0]["total_s"] == 7.25


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, {"error": {"message": "the last 256 are kept"}}), ["the last 256 are kept"]),
        ((404, b"<html>"), ["status 404", "no message of quire"]),
        ((200, b"{}"), ["not an answer of quire", "timelines"]),
        ((200, b"hello"), ["not an answer of quire"]),
    ],
)
def test_error_of_the_server_is_told(server, capsys, answer, words):
    url, answers, _ = server
    answers["/v1/requests/a/timeline"] = answer
    assert main(["explain", "a", "--base-url", url]) == 1
    shown = capsys.readouterr().err
    assert all(word in shown for word in words), shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--base-url", "localhost:8000"], ["--base-url", "'localhost:8000'", "http://127.0.0.1:8000"]),
        (["--base-url", "http://127.0.0.1:1"], ["no answer", "is the server running there"]),
        (["--chrome-trace", "/no/such/folder/a.json"], ["--chrome-trace", "folder that exists"]),
    ],
)
def test_bad_option_is_told(capsys, options, words):
    assert main(["explain", "a", *options]) == 1
    shown = capsys.readouterr().err
    assert all(word in shown for word in words), shown


@contextmanager
def no_http():
    """Yield the URL of a port at which something else than HTTP answers once."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(bytes(12) + b"\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(10)


def test_port_that_speaks_no_http_is_told(capsys):
    with no_http() as url:
        assert main(["explain", "a", "--base-url", url]) == 1
    assert "no answer" in capsys.readouterr().err


def test_prometheus_that_speaks_no_http_is_an_error():
    with no_http() as url, pytest.raises(SourceError, match="does not answer"):
        PrometheusSource(url, timeout_s=5).read(0.0)
