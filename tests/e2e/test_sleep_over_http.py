"""A server that is put to sleep: its memory, its state for load balancers, its running requests, and all of its replicas."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="needs quire[server]")

from quire.parallel.worker_group import resident_bytes
from tests.e2e.server_process import serving

pytestmark = pytest.mark.slow
ADMIN, USER = "admin-secret", "user-secret"
ASK = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
LONG = {**ASK, "max_tokens": 900, "ignore_eos": True}


def write_keys(folder: Path):
    keys = [{"key": ADMIN, "name": "root", "admin": True}, {"key": USER, "name": "user"}]
    (folder / "keys.json").write_text(json.dumps(keys))
    return str(folder / "keys.json")


def post(server, path, key=ADMIN):
    return server.post(path, {}, headers={"authorization": f"Bearer {key}"})


def text_of(server):
    answer = server.post("/v1/completions", ASK)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def start_long(server, found):
    """Send a long request from a thread, and return when it runs."""
    thread = threading.Thread(target=lambda: found.append(server.post("/v1/completions", LONG)))
    thread.start()
    server.wait_for(lambda: server.get("/load").json()["running"] > 0)
    return thread


def test_server_gives_its_memory_back_and_refuses_requests_until_it_wakes_up(tmp_path):
    with serving("--api-key-file", write_keys(tmp_path), "--device", "cpu", "--max-num-seqs", "64", key=ADMIN) as server:
        server.wait_ready()
        expected, num_awake = text_of(server), resident_bytes(server.engine_pid())
        for path in ("/sleep", "/wake_up"):
            assert post(server, path, USER).status_code == 403
        assert post(server, "/sleep?level=3").json()["error"]["param"] == "level"
        assert post(server, "/sleep?mode=keep").json()["error"]["param"] == "mode"
        assert post(server, "/wake_up?tags=weights").json()["error"]["param"] == "tags"
        for level in (1, 2):
            assert post(server, f"/sleep?level={level}").json() == {"is_sleeping": True}
        assert resident_bytes(server.engine_pid()) < num_awake - (30 << 20)
        assert server.get("/is_sleeping").json() == {"is_sleeping": True}
        assert server.get("/ready").json() == {"status": "not ready", "reason": "engine sleeping"}
        health = server.get("/health")
        assert (health.status_code, health.json()["engine"]) == (200, "sleeping")
        assert server.metric("quire:engine_state", state="sleeping") == 1
        refused = server.post("/v1/completions", ASK)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "POST /wake_up" in refused.json()["error"]["message"]
        assert post(server, "/wake_up").json() == {"is_sleeping": False}
        assert server.get("/ready").status_code == 200
        assert text_of(server) == expected


def test_running_requests_end_with_an_error_or_are_finished_as_the_mode_says():
    with serving("--device", "cpu") as server:
        server.wait_ready()
        found = []
        thread = start_long(server, found)
        assert post(server, "/sleep").status_code == 200
        thread.join()
        assert found[0].status_code == 503
        assert re.search("put to sleep|asleep", found[0].json()["error"]["message"])
        post(server, "/wake_up")
        found.clear()
        thread = start_long(server, found)
        assert post(server, "/sleep?mode=wait").status_code == 200
        thread.join()
        assert found[0].status_code == 200
        assert found[0].json()["usage"]["completion_tokens"] == 900
        assert server.get("/is_sleeping").json() == {"is_sleeping": True}


def test_all_replicas_sleep_and_wake_up_together():
    with serving("--device", "cpu", "--data-parallel-size", "2") as server:
        server.wait_ready()
        expected = text_of(server)
        assert post(server, "/sleep?level=2").json() == {"is_sleeping": True}
        assert [one["engine"] for one in server.get("/health").json()["replicas"]] == ["sleeping", "sleeping"]
        assert server.post("/v1/completions", ASK).status_code == 503
        assert post(server, "/wake_up").json() == {"is_sleeping": False}
        assert text_of(server) == expected
