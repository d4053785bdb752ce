"""`quire explain` of a request to a real server, by the id that its answer has in x-request-id."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("uvicorn", reason="needs quire[server]")

import httpx

from tests.e2e.server_process import serving

PROMPT = "Once upon a time there was a little girl who lived near a wood, and every morning she went to the well. " * 4


def explain(server, *options):
    command = [sys.executable, "-m", "quire", "explain", *options, "--base-url", server.url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def server():
    with serving("--max-num-batched-tokens", "32", "--max-num-seqs", "8", "--max-timelines", "3") as server:
        yield server


def complete(server, **body):
    answer = server.post("/v1/completions", {"model": "demo", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, **body})
    assert answer.status_code == 200, answer.text
    return answer


def test_request_is_explained_by_its_x_request_id(server, tmp_path):
    answer = complete(server, max_tokens=20)
    num_prompt = answer.json()["usage"]["prompt_tokens"]
    told = explain(server, answer.headers["x-request-id"])
    assert told.returncode == 0, told.stderr
    assert f"{num_prompt} prompt tokens (0 cached), 20 output tokens" in told.stdout
    assert "of the time" in told.stdout
    path = tmp_path / "trace.json"
    told = explain(server, answer.json()["id"], "--json", "--chrome-trace", str(path))
    (timeline,) = json.loads(told.stdout)["timelines"]
    events = timeline["events"]
    chunks = [event for event in events if event["kind"] == "prefill"]
    assert len(chunks) == -(-num_prompt // 32)
    assert sum(chunk["tokens"] for chunk in chunks) == num_prompt
    (decode,) = [event for event in events if event["kind"] == "decode"]
    assert (decode["tokens"], decode["steps"]) == (19, 19)
    starts = [event["start_s"] for event in events]
    assert starts[0] == 0.0
    assert max(event["start_s"] + event.get("duration_s", 0.0) for event in events) <= timeline["total_s"] + 1e-5
    assert sum(phase["seconds"] for phase in timeline["phases"]) == pytest.approx(timeline["total_s"], abs=1e-4)
    assert any(event["name"] == "prefill" for event in json.loads(path.read_text())["traceEvents"])


def test_trace_of_all_has_the_steps_of_the_engine(server, tmp_path):
    complete(server, max_tokens=4)
    path = tmp_path / "all.json"
    told = explain(server, "--chrome-trace", str(path))
    assert told.returncode == 0, told.stderr
    events = json.loads(path.read_text())["traceEvents"]
    assert any(event["ph"] == "X" and event["args"].get("decode_tokens") == 1 for event in events)
    assert any(event["ph"] == "C" and event["name"] == "sequences" for event in events)


def test_unknown_request_is_told_how_many_are_kept(server):
    for _ in range(4):
        complete(server, prompt="a", max_tokens=1)
    told = explain(server, "req_unknown")
    assert told.returncode == 1
    assert "'req_unknown'" in told.stderr
    assert "the last 3 ended requests are kept (--max-timelines), 3 now" in told.stderr


def test_running_request_is_explained_so_far(server):
    body = {"model": "demo", "prompt": "b", "n": 8, "max_tokens": 1000, "ignore_eos": True, "stream": True}

    def ask_while_it_runs():
        """Return the timeline; None if the request has not decoded yet, or ended before the answer."""
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            (timeline,) = server.get(f"/v1/requests/{answer.headers['x-request-id']}/timeline").json()["timelines"]
        has_decoded = any(event["kind"] == "decode" for event in timeline["events"])
        return timeline if timeline["state"] == "decode" and has_decoded else None

    timeline = server.wait_for(ask_while_it_runs)
    assert timeline["finish_reasons"] == []
    kinds = [event["kind"] for event in timeline["events"]]
    assert kinds[0] == "received"
    assert {"queue", "admit", "prefill", "decode", "first_token"} <= set(kinds)
    assert {event.get("choice", 0) for event in timeline["events"]} == set(range(8))
    assert "finish" not in kinds
