"""A server behind a real nginx, which has it at a prefix, with the lines that docs/guides/deployment.md has for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.browser.test_chat_page import say, wait_for_answers
from tests.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed"),
]
ROOT = Path(__file__).resolve().parents[2]
PREFIX = "/llm"
CONFIG = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{ listen 127.0.0.1:{port}; {location} }}
}}
"""


def wait_until_ready(url, processes, timeout_s=120):
    begin = time.monotonic()
    while time.monotonic() - begin < timeout_s:
        assert all(process.poll() is None for process in processes), "the server or nginx has ended"
        try:
            if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("waited in vain")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Return the URL at nginx, which the documentation's lines configure, of a server on a Unix socket."""
    folder = tmp_path_factory.mktemp("nginx")
    path = folder / "http.sock"
    text = (ROOT / "docs/guides/deployment.md").read_text(encoding="utf-8")
    location = re.search(r"```nginx\n(.*?)```", text, re.DOTALL)[1].replace("/run/quire/http.sock", str(path))
    assert f"location {PREFIX}/" in location
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(folder=folder, port=port, location=location))
    serve = [
        sys.executable,
        "-m",
        "quire",
        "serve",
        "demo",
        "--uds",
        str(path),
        "--root-path",
        PREFIX,
        "--num-kv-blocks",
        "512",
    ]
    found = f"http://127.0.0.1:{port}{PREFIX}"
    processes = [
        subprocess.Popen(serve, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}),
        subprocess.Popen(["nginx", "-p", str(folder), "-c", str(config)], stderr=subprocess.DEVNULL),
    ]
    try:
        wait_until_ready(found, processes)
        yield found
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(60)


def test_pieces_of_a_stream_are_passed_on_as_they_come(url):
    body = {"model": "demo", "prompt": "The sea", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(trust_env=False, timeout=120) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as answer,
    ):
        pieces = list(answer.iter_raw())
    assert pieces[-1].endswith(b"data: [DONE]\n\n")
    assert 1 in {piece.count(b"data: ") for piece in pieces[:-2]}


def test_clients_take_the_prefix_as_a_part_of_the_address(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked = {"model": "demo", "prompt": "The sea", "max_tokens": 8, "temperature": 0}
        whole = client.completions.create(**asked).choices[0].text
        assert "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == whole
        with pytest.raises(openai.NotFoundError):
            client.completions.create(**{**asked, "model": "nope"})
    document = httpx.get(f"{url}/openapi.json", trust_env=False).json()
    assert document["servers"] == [{"url": PREFIX}]


def test_page_chats_behind_the_prefix(url, browser):
    browser.open(f"{url}/")
    browser.until(lambda: browser.one("#model").text == "demo", "the model's name")
    browser.labelled("Max tokens").send_keys("20")
    say(browser, "Tell me about a lion.")
    wait_for_answers(browser, 1)
    assert len(browser.one(".msg.assistant .text").text) > 10
