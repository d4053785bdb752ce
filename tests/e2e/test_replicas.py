"""A server of two replicas, as processes: the tokens of one, prefix hits, metrics, the death of one of them, the drain."""

from __future__ import annotations

import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("uvicorn", reason="needs quire[server]")

from tests.e2e.server_process import ServerProcess, serving
from tests.ranks import is_alive, wait_until

pytestmark = pytest.mark.slow

PROMPTS = [
    f"{start} {word}" for start in ("It was a cold morning when", "The detective looked at") for word in ("the", "a", "her")
]
SYSTEM = "You are a careful clerk who answers briefly and never forgets what was said before in the same talk. " * 2


@pytest.fixture(scope="module")
def replicas():
    with serving("-dp", "2", "--max-num-seqs", "8") as server:
        yield server


@pytest.fixture(scope="module")
def one():
    with serving("--max-num-seqs", "8") as server:
        yield server


def _complete(server, prompt, **more):
    body = {"model": "demo", "prompt": prompt, "max_tokens": 12, "temperature": 0.8, "seed": 5, **more}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def _at_once(call, items):
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(call, items))


def _prefix_hits(server):
    queries, hits = server.metrics("quire:prefix_cache_queries_total", "quire:prefix_cache_hits_total")
    return queries, hits


def test_tokens_are_those_of_one_replica_and_both_work(one, replicas):
    assert _at_once(lambda prompt: _complete(replicas, prompt, n=2), PROMPTS * 2) == _at_once(
        lambda prompt: _complete(one, prompt, n=2), PROMPTS * 2
    )
    steps = [replicas.metric("quire:engine_step_seconds_count", replica=str(index)) for index in (0, 1)]
    assert all(steps)
    states = [replicas.metric("quire:engine_state", replica=str(index), state="ready") for index in (0, 1)]
    assert states == [1, 1]
    assert one.metric("quire:engine_state", state="ready") == 1
    assert 'replica="' not in one.get("/metrics").text


def test_other_routes_work(replicas, one):
    embedding = {"model": "demo", "input": ["one text", "another text"]}
    assert replicas.post("/v1/embeddings", embedding).json()["data"] == one.post("/v1/embeddings", embedding).json()["data"]
    tokens = {"model": "demo", "prompt": PROMPTS[0]}
    assert replicas.post("/tokenize", tokens).json() == one.post("/tokenize", tokens).json()
    assert [model["id"] for model in replicas.get("/v1/models").json()["data"]] == ["demo"]
    health = replicas.get("/health").json()
    assert [(row["replica"], row["engine"], row["error"]) for row in health["replicas"]] == [
        (0, "ready", None),
        (1, "ready", None),
    ]
    assert "replicas" not in one.get("/health").json()


def _share_of_hits(server, salt=""):
    """Return the share of prompt tokens that is cached when six talks, which begin with the salt, go on at once."""
    before = _prefix_hits(server)
    _at_once(lambda name: _talk(server, salt, name), ["Ann", "Bob", "Cid", "Dora", "Eve", "Finn"])
    queries, found = (new - old for new, old in zip(_prefix_hits(server), before, strict=True))
    return found / queries


def _talk(server, salt, name, num_turns=5):
    text = f"{salt}{SYSTEM}{name}: "
    for turn in range(num_turns):
        text += f"Tell me about the number {turn} and why {name} likes it so much. "
        (answer,) = _complete(server, text, temperature=0, max_tokens=10, ignore_eos=True)
        text += answer + " "


def test_prefix_hits_are_nearly_those_of_one_replica(one, replicas):
    expected = _share_of_hits(one)
    assert expected > 0.5
    # A busy machine lets some turns go to the other replica.
    assert any(_share_of_hits(replicas, salt) >= 0.8 * expected for salt in ("", "Again. ", "Once more. "))


def test_a_killed_replica_costs_its_own_requests_and_comes_back_and_sigterm_drains_both():
    with serving("-dp", "2", "--max-num-seqs", "8") as server:
        expected = _complete(server, PROMPTS[0], max_tokens=800, ignore_eos=True)
        pids = server.engine_pids()
        assert len(pids) == 2
        answers = []

        def ask():
            body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 800, "ignore_eos": True, "temperature": 0.8, "seed": 5}
            answers.append(server.post("/v1/completions", body, timeout=120))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        server.wait_for(lambda: min(running := _running(server)) >= 1 and sum(running) == 8)
        os.kill(pids[1], signal.SIGKILL)
        dead = server.wait_for(lambda: [row for row in server.get("/health").json()["replicas"] if row["engine"] != "ready"])
        assert server.get("/health").status_code == 200
        assert server.get("/ready").status_code == 200
        assert "SIGKILL" in dead[0]["error"]
        for thread in threads:
            thread.join()
        by_status = {status: [one for one in answers if one.status_code == status] for status in (200, 503)}
        assert min(map(len, by_status.values())) >= 1
        assert sum(map(len, by_status.values())) == 8
        assert all([choice["text"] for choice in one.json()["choices"]] == expected for one in by_status[200])
        assert all(one.json()["error"]["code"] == "engine_error" for one in by_status[503])
        index = dead[0]["replica"]
        server.wait_for(lambda: server.get("/health").json()["replicas"][index]["engine"] == "ready")
        before = server.metric("quire:engine_step_seconds_count", replica=str(index))
        assert _at_once(lambda prompt: _complete(server, prompt, max_tokens=30), PROMPTS)
        assert server.metric("quire:engine_step_seconds_count", replica=str(index)) > before
        assert server.metric("quire:engine_restarts_total", replica=str(index)) == 1
        assert len(server.engine_pids()) == 2
        _expect_drain(server)


def _running(server):
    """Return how many requests each replica runs."""
    return [server.metric("quire:num_requests_running", replica=str(index)) for index in (0, 1)]


def _expect_drain(server):
    """End the server while both replicas work: their requests are answered, and no process is left."""
    pids, answers = server.engine_pids(), []

    def ask():
        body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 400, "ignore_eos": True, "temperature": 0}
        answers.append(server.post("/v1/completions", body))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    server.wait_for(lambda: all(running := _running(server)) and sum(running) + len(answers) == 6)
    assert server.stop() == 0
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 6
    assert all(answer.json()["usage"]["completion_tokens"] == 400 for answer in answers)
    assert wait_until(lambda: not any(map(is_alive, pids)))


def test_replicas_of_two_ranks_each_give_the_same_tokens(one):
    with serving("-dp", "2", "-tp", "2", "--max-num-seqs", "8") as server:
        assert _at_once(lambda prompt: _complete(server, prompt), PROMPTS) == _at_once(
            lambda prompt: _complete(one, prompt), PROMPTS
        )
        assert all(server.metric("quire:engine_step_seconds_count", replica=str(index)) for index in (0, 1))


def test_a_server_whose_replicas_do_not_fit_says_which_and_the_numbers():
    server = ServerProcess("-dp", "2", "--host-memory-bytes", "20000000")
    try:
        assert server.process.wait(60) == 1
        assert re.search(r"replica [01] of 2: the model does not fit: 9\.5 MiB are available", server.whole_log())
    finally:
        server.kill()
