"""`quire bench serve` from its options to its files, over real sockets, and its refusals."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from quire.cli.main import main
from tests.unit.bench.serving.fakes import DONE, chunked, head, refusal, text_event, usage_event


class SocketServer:
    """A server in a thread of its own: answers by path, remembers bodies, and calls a hook for each."""

    def __init__(self, answer, tls=None):
        self.answer = answer
        self._tls = tls
        self.bodies = []
        self.heads = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self):
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._connections = set()
        server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _on_connection(self, reader, writer):
        self._connections.add(asyncio.current_task())
        try:
            while True:
                start = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line[15:]) for line in start.split(b"\r\n") if line.startswith(b"Content-Length")), 0)
                body = await reader.readexactly(length)
                await self._reply(start, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _reply(self, start, body, writer):
        self.heads.append(start)
        if start.startswith(b"GET /v1/models "):
            writer.write(refusal(200, b'{"data":[{"id":"served"}]}'))
            return
        self.bodies.append(json.loads(body))
        for part in self.answer(len(self.bodies), self.bodies[-1]):
            writer.write(part)
            await writer.drain()
        if part == b"":  # the answer stays open
            await asyncio.Event().wait()


def good_answer(_, body):
    number = body.get("max_tokens", body.get("max_completion_tokens"))
    yield head()
    for index in range(number):
        yield chunked(text_event("x", '"length"' if index == number - 1 else "null"), end=False)
    yield chunked(usage_event(len(body.get("prompt", "")), number), DONE)


def run(capsys, port, *argv):
    status = main(["bench", "serve", "--port", str(port), "--no-progress", *map(str, argv)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_run_writes_its_files_when_the_server_is_good(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    files = ("--output-json", tmp_path / "a.json", "--html-report", tmp_path / "a.html", "--save-result", "--save-detailed")
    with SocketServer(good_answer) as server:
        status, out, err = run(
            capsys, server.port, "--num-prompts", 7, "--random-input-len", 20, "--random-output-len", 5, "--seed", 3,
            "--max-concurrency", 3, "--num-warmups", 2, "--ignore-eos", "--extra-body", '{"top_k": 4}', "--header", "X-A=b c",
            "--goodput", "ttft:60000", "e2el:60000", "--server-pid", os.getpid(), "--result-dir", tmp_path, *files,
        )  # fmt: skip
    assert (status, err) == (0, "")
    assert "Request goodput (req/s):" in out
    figures = json.loads((tmp_path / "a.json").read_text())
    assert (figures["completed"], figures["total_input_tokens"], figures["total_output_tokens"]) == (7, 140, 35)
    assert (figures["model"], figures["num_good_requests"], figures["token_count_source"]) == ("served", 7, {"usage": 7})
    assert figures["client"]["num_connections"] <= 3
    assert len(figures["requests"]) == 7
    assert figures["warnings"] == [] or "late" in figures["warnings"][0] or "core" in figures["warnings"][0]
    assert "secret" not in json.dumps(figures)
    assert "<svg" in (tmp_path / "a.html").read_text()
    assert len(list(tmp_path.glob("serve-served-*.json"))) == 1
    assert len(server.bodies) == 9
    assert all(b"\r\nAuthorization: Bearer secret\r\nX-A: b c\r\n" in start for start in server.heads)
    body = server.bodies[-1]
    assert (body["top_k"], body["ignore_eos"], body["stream"], len(body["prompt"])) == (4, True, True, 20)
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == 9


def test_chat_prompts_are_text_of_the_wanted_length_and_text_is_counted(capsys, tmp_path):
    def answer(_, body):
        yield head()
        event = {"choices": [{"index": 0, "delta": {"content": " the the the"}, "finish_reason": "stop"}]}
        yield chunked(b"data: " + json.dumps(event).encode() + b"\n\n", DONE)

    path = tmp_path / "a.json"
    with SocketServer(answer) as server:
        options = ("--backend", "openai-chat", "--tokenizer", "demo", "--model", "m", "--output-json", path)
        status, out, _ = run(capsys, server.port, "--num-prompts", 2, "--input-len", 9, *options)
    figures = json.loads(path.read_text())
    assert (status, figures["total_input_tokens"], figures["token_count_source"]) == (0, 18, {"tokenizer": 2})
    assert figures["total_output_tokens"] == 6
    assert "warning: 2 outputs are shorter" in out
    assert {body["model"] for body in server.bodies} == {"m"}
    assert server.heads[-1].startswith(b"POST /v1/chat/completions ")


def test_failures_and_refusals_are_counted_apart(capsys, tmp_path):
    def answer(number, body):
        if number == 1:
            return [refusal(500, b'{"error":{"message":"broke"}}')]
        if number == 2:
            return [refusal(429, b"{}", "Retry-After: 1\r\n")]
        return good_answer(number, body)

    path = tmp_path / "a.json"
    with SocketServer(answer) as server:
        status, _, _ = run(
            capsys, server.port, "--num-prompts", 5, "--max-concurrency", 1, "--random-output-len", 3, "--output-json", path
        )
    figures = json.loads(path.read_text())
    assert status == 0
    assert (figures["completed"], figures["failed"], figures["rejected"]) == (3, 1, 1)
    assert figures["failures"]["http_500"]["example"] == "broke"
    assert figures["rejections"] == {"429": 1}


def test_exit_status_is_1_when_nothing_succeeded(capsys):
    with SocketServer(lambda *_: [refusal(500)]) as server:
        status, out, _ = run(capsys, server.port, "--num-prompts", 3)
    assert status == 1
    assert "no request succeeded" in out


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_interrupt_prints_what_was_done_until_then(capsys, tmp_path):
    def answer(number, body):
        if number < 4:
            yield from good_answer(number, body)
            return
        os.kill(os.getpid(), signal.SIGINT)
        yield head() + chunked(text_event("x"), end=False)
        yield b""

    path = tmp_path / "a.json"
    with SocketServer(answer) as server:
        options = ("--max-concurrency", 1, "--random-output-len", 2, "--output-json", path)
        status, out, _ = run(capsys, server.port, "--num-prompts", 9, *options)
    figures = json.loads(path.read_text())
    assert (status, figures["interrupted"]) == (130, True)
    assert (figures["completed"], figures["aborted"], figures["not_sent"]) == (3, 1, 5)
    assert "(interrupted)" in out


def test_trace_is_replayed_in_order(capsys, tmp_path):
    rows = [{"timestamp": 10 * i, "input_length": 600 + i, "output_length": 2, "hash_ids": [1, 2 + i]} for i in range(4)]
    path, result = tmp_path / "trace", tmp_path / "a.json"
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = ("--dataset-name", "trace", "--dataset-path", path, "--trace-speed", 10, "--max-trace-requests", 3)
    with SocketServer(good_answer) as server:
        status, _, _ = run(capsys, server.port, *trace, "--output-json", result, "--save-detailed")
    figures = json.loads(result.read_text())
    assert (status, figures["completed"], figures["total_input_tokens"]) == (0, 3, 1803)
    assert "as recorded at 10 times the speed" in figures["arrival"]
    due = [row["scheduled_s"] for row in figures["requests"]]
    assert due == pytest.approx([0.0, 0.001, 0.002], abs=1e-6)
    assert all(row["sent_s"] >= row["scheduled_s"] - 3e-6 for row in figures["requests"])
    assert len({tuple(body["prompt"][:512]) for body in server.bodies}) == 1


def test_same_workload_runs_through_an_engine_of_this_process(capsys, tmp_path, tiny_model):
    path = tmp_path / "a.json"
    options = ("--in-process", "--model", tiny_model, "--num-prompts", 4, "--random-input-len", 12, "--random-output-len", 5)
    pool = ("--num-kv-blocks", 40, "--log-level", "error", "--ignore-eos", "--num-warmups", 1, "--output-json", path)
    status, _, err = run(capsys, 1, *options, *pool)
    assert (status, err) == (0, "")
    figures = json.loads(path.read_text())
    assert (figures["backend"], figures["completed"], figures["total_input_tokens"]) == ("in-process", 4, 48)
    assert (figures["total_output_tokens"], figures["client"]["cpu_ms_per_request"] > 0) == (20, True)


def test_failing_requests_are_counted_when_the_engine_refuses_them(capsys, tmp_path, tiny_model):
    options = ("--in-process", "--model", tiny_model, "--num-prompts", 2, "--vocab-size", 4000000, "--num-kv-blocks", 40)
    status, out, _ = run(capsys, 1, *options, "--log-level", "error")
    assert status == 1
    assert "RequestError:" in out


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "argv,named",
    [
        (("--base-url", "ftp://x"), "--base-url"),
        (("--base-url", "http://h:99999"), "--base-url"),
        (("--port", "0"), "--port"),
        (("--endpoint", "v1"), "--endpoint"),
        (("--header", "novalue"), "--header"),
        (("--header", "A=b\r\nC: d"), "--header"),
        (("--header", "Content-Length=4"), "--header"),
        (("--extra-body", "[1]"), "--extra-body"),
        (("--extra-body", '{"stream": false}'), "--extra-body"),
        (("--goodput", "itl:4"), "--goodput"),
        (("--percentile-metrics", "ttft,speed"), "--percentile-metrics"),
        (("--metric-percentiles", "50,101"), "--metric-percentiles"),
        (("--request-rate", "0"), "--request-rate"),
        (("--max-concurrency", "0"), "--max-concurrency"),
        (("--num-prompts", "0"), "--num-prompts"),
        (("--dataset-name", "trace"), "--dataset-path"),
        (("--trace-duration", "5"), "--dataset-name trace"),
        (("--num-kv-blocks", "5"), "--in-process"),
        (("--retry", "-1"), "--retry"),
        (("--backend", "openai-chat", "--prompt-form", "ids"), "--prompt-form"),
        (("--in-process", "--backend", "openai-chat"), "--in-process"),
        (("--html-report", "/nowhere/a.html"), "--html-report"),
        (("--output-json", "/nowhere/a.json"), "--output-json"),
        (("--save-result", "--result-dir", "/nowhere"), "--result-dir"),
        (("--save-detailed",), "--save-detailed"),
        (("--result-filename", "a"), "--result-filename"),
        (("--server-pid", "4194305"), "--server-pid"),
        (("--ready-check-timeout-sec", "0"), "no server is ready"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_option_is_refused_by_its_name(capsys, argv, named):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OPENAI_API_KEY", raising=False)
        status, _, err = run(capsys, 1, *argv)
    assert status == 1
    assert err.startswith("error: ")
    assert named in err


def test_wrong_key_is_told_before_the_run(capsys):
    class Guarded(SocketServer):
        async def _reply(self, start, body, writer):
            writer.write(refusal(401, b'{"error":{"message":"no key"}}'))

    with Guarded(None) as server:
        status, _, err = run(capsys, server.port)
    assert (status, "OPENAI_API_KEY" in err, "no key" in err) == (1, True, True)


def test_load_on_a_server_needs_no_torch():
    code = "import quire.bench.serving.serve, quire.bench.serving.html_report, sys; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def self_signed(folder):
    """Write a certificate of 127.0.0.1 with its key; skip where there is no tool for it."""
    import shutil

    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-out", str(cert), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_https_is_spoken_with_trusted_servers_only(capsys, tmp_path, monkeypatch):
    import ssl

    cert, key = self_signed(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    with SocketServer(good_answer, context) as server:
        options = ("--base-url", f"https://127.0.0.1:{server.port}", "--num-prompts", 3, "--random-output-len", 4)
        status, _, err = run(capsys, 1, *options, "--ready-check-timeout-sec", 0)
        assert (status, "certificate" in err.lower()) == (1, True)
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        status, out, err = run(capsys, 1, *options)
    assert (status, err) == (0, "")
    assert "Successful requests:                       3" in out


def test_standard_library_does_where_the_extras_are_missing():
    code = """
import sys
sys.modules["msgspec"] = sys.modules["uvloop"] = None
from quire.bench.serving.openai_stream import JSON_PARSER, StreamRecorder
from quire.bench.serving.records import RequestRecord
from quire.bench.serving.serve import find_event_loop
records = [RequestRecord(0, 0.0, 1, 1), RequestRecord(1, 0.0, 1, 1)]
for record, text in zip(records, (b'{"choices":[{"text":"a","finish_reason":"stop"}]}', b'{')):
    recorder = StreamRecorder(record)
    recorder.on_body(b"data: " + text + b"\\n\\ndata: [DONE]\\n\\n", 1.0)
    recorder.finish(2.0)
print(JSON_PARSER, find_event_loop()[0], records[0].outcome, records[1].error_kind)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["json", "asyncio", "ok", "bad_json"]
