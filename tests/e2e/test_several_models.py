"""`quire serve` with several models in real processes: one at a time in the memory; none outlives the server."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys

import httpx
import pytest

from tests.e2e.server_process import LoggedProcess
from tests.ranks import is_alive, wait_until

pytest.importorskip("uvicorn", reason="needs quire[server]")

pytestmark = pytest.mark.slow

TIMEOUT_S = 500
FILE = """
port: 0
memory: 400MiB
max-wait-s: 400
drain-timeout: 5
models:
  - name: demo
    model: demo
    memory: 300MiB
    aliases: [default]
    options: {max-num-seqs: 4, max-num-batched-tokens: 256, num-threads: 1}
  - name: small
    model: demo-draft
    memory: 200MiB
    options: {max-num-seqs: 4, max-num-batched-tokens: 256, num-threads: 1}
"""


class FleetServer(LoggedProcess):
    """A real server on a free port."""

    patience_s = TIMEOUT_S

    def __init__(self, folder, text=FILE):
        path = folder / "fleet.yaml"
        path.write_text(text)
        command = [sys.executable, "-m", "quire", "serve", "--config", str(path)]
        super().__init__(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.url = self.wait_for_log(r"listening on (http://[\d.:]+)")[1]

    def complete(self, model):
        body = {"model": model, "prompt": "It was a cold", "max_tokens": 4, "temperature": 0}
        return httpx.post(self.url + "/v1/completions", json=body, timeout=TIMEOUT_S)

    def states(self):
        listed = httpx.get(self.url + "/health", timeout=30).json()["models"]
        return {entry["name"]: entry["state"] for entry in listed}

    def metrics(self):
        return httpx.get(self.url + "/metrics", timeout=30).text


@contextlib.contextmanager
def serving(folder):
    server = FleetServer(folder)
    try:
        yield server
    finally:
        server.kill()


def descendants_of(pid):
    """Return the ids of all processes below one."""
    found = []
    command = ["pgrep", "-P", str(pid)]
    for child in map(int, subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()):
        found += [child, *descendants_of(child)]
    return found


def assert_ended(pids):
    assert len(pids) >= 2  # the server of the model and its engine
    assert wait_until(lambda: not any(map(is_alive, pids)), 60)


def test_models_take_turns_in_the_memory(tmp_path):
    with serving(tmp_path) as server:
        assert server.states() == {"demo": "unloaded", "small": "unloaded"}
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(server.complete, ["demo", "default", "demo"]))
        assert [answer.status_code for answer in answers] == [200] * 3
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
        assert server.states() == {"demo": "loaded", "small": "unloaded"}
        assert 'quire_fleet:loads_total{model="demo",result="loaded"} 1.0' in server.metrics()
        first = descendants_of(server.process.pid)
        assert server.complete("small").json()["model"] == "small"
        assert server.states() == {"demo": "unloaded", "small": "loaded"}
        assert_ended([pid for pid in first if pid not in descendants_of(server.process.pid)])
        assert 'quire_fleet:unloads_total{model="demo",reason="memory"} 1.0' in server.metrics()
        assert server.complete("none").status_code == 404
        pids = descendants_of(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert_ended(pids)


def test_no_process_outlives_a_killed_server_and_a_killed_model_comes_back(tmp_path):
    with serving(tmp_path) as server:
        assert server.complete("small").status_code == 200
        model = int(subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True, check=True).stdout)
        pids = descendants_of(server.process.pid)
        os.kill(model, signal.SIGKILL)
        server.wait_for(lambda: server.states()["small"] == "unloaded")
        assert_ended(pids)
        assert server.complete("small").status_code in (200, 503)  # 503 until the pause is over
        server.wait_for(lambda: server.complete("small").status_code == 200)
        pids = descendants_of(server.process.pid)
        server.process.kill()
        server.process.wait()
        assert_ended(pids)
