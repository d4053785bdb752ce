"""A server on a Unix socket, with TLS, with a prefix, without an access log, with options from a file."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
import threading
import time

import httpx
import pytest

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")


@pytest.fixture
def pems(tmp_path):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command.split(), *names, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return key, cert


def wait_ready(client, process, timeout_s=120):
    begin = time.monotonic()
    while time.monotonic() - begin < timeout_s:
        assert process.poll() is None, "the server has ended"
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError("waited in vain")


@pytest.mark.slow
def test_server_of_a_file_answers_over_a_unix_socket_with_tls_and_a_prefix(tmp_path, pems):
    key, cert = pems
    path = tmp_path / "s.sock"
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0]['content'] }}!")
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"uds: {path}\nssl-keyfile: {key}\nssl-certfile: {cert}\nroot-path: /llm\naccess-log: false\n"
        f"num-kv-blocks: 128\nchat-template: {template}\nserved-model-name: mine\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "quire", "serve", "demo", "--config", str(file)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr), daemon=True)
    reader.start()
    transport = httpx.HTTPTransport(uds=str(path), verify=ssl.create_default_context(cafile=str(cert)))
    try:
        with httpx.Client(transport=transport, base_url="https://localhost", timeout=60) as client:
            wait_ready(client, process)
            for prefix in ("", "/llm"):
                body = {"model": "mine", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
                answer = client.post(f"{prefix}/v1/chat/completions", json=body)
                assert answer.status_code == 200
                assert answer.json()["usage"]["completion_tokens"] <= 4
            streamed = client.post("/llm/v1/chat/completions", json={**body, "stream": True}).text
            assert streamed.endswith("data: [DONE]\n\n")
            tokens = client.post("/tokenize", json={"messages": body["messages"], "model": "mine"}).json()["tokens"]
            assert client.post("/detokenize", json={"tokens": tokens}).json()["prompt"].endswith("hi!")
            assert client.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
            assert client.get("/llmx/version").status_code == 404
    finally:
        process.terminate()
        assert process.wait(60) == 0
        reader.join(10)
        process.stderr.close()
    assert not path.exists()
    text = "".join(log)
    assert "listening on the Unix socket" in text
    assert "POST /v1/chat/completions" not in text


def run_serve(*options):
    command = [sys.executable, "-m", "quire", "serve", "demo", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_start_is_refused_at_once_when_key_and_certificate_do_not_fit(tmp_path, pems):
    key, cert = pems
    alone = run_serve("--port", "0", "--ssl-keyfile", str(key))
    assert (alone.returncode, "ssl_certfile is not given" in alone.stderr) == (1, True)
    wrong = run_serve("--port", "0", "--ssl-keyfile", str(cert), "--ssl-certfile", str(cert))
    assert (wrong.returncode, "cannot be used" in wrong.stderr) == (1, True)
