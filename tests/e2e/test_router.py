"""quire router in front of two real servers: same bytes, prefix hits, the death of a server, the drain."""

from __future__ import annotations

import json
import re
import signal
import threading

import httpx
import pytest

pytest.importorskip("uvicorn", reason="needs quire[server]")

from tests.e2e.router_process import routing
from tests.e2e.server_process import ServerProcess, serving

pytestmark = pytest.mark.slow

TEXT = "It was a cold morning when the detective looked at the house and saw that nobody had lived there for a long time. " * 6


@pytest.fixture(scope="module")
def servers():
    with serving() as first, serving() as second:
        yield first, second


def text_of(stream):
    """Return the text of a stream that is complete; how many tokens an event has differs from run to run."""
    *events, done = re.findall(rb"data: (.*)\n\n", stream)
    assert done == b"[DONE]"
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def test_answers_are_those_of_a_server(servers):
    body = {"model": "demo", "prompt": TEXT, "max_tokens": 12, "temperature": 0, "logprobs": 2}
    with routing(*servers) as router:
        whole = router.post("/v1/completions", body)
        assert (whole.status_code, whole.json()["choices"]) == (200, servers[0].post("/v1/completions", body).json()["choices"])
        streamed = router.post("/v1/completions", {**body, "stream": True})
        assert text_of(streamed.content) == whole.json()["choices"][0]["text"]
        assert streamed.content.endswith(b"data: [DONE]\n\n")
        assert router.get("/v1/models").json()["data"][0]["id"] == "demo"
        assert router.post("/v1/completions", {**body, "model": "none"}).status_code == 404
        assert router.post("/tokenize", {"model": "demo", "prompt": "a"}).json()["count"] > 0


def test_prefixes_are_found_again_more_often_than_by_turns(servers):
    """Seven conversations of four turns: each turn has all that went before it. Turns alternate between two servers."""

    def share(policy, salt):
        with routing(*servers, options=("--policy", policy)) as router:
            num_cached = num_prompt = 0
            for turn in range(1, 5):
                for number in range(7):
                    prompt = f"{salt} {number} " + "".join(f"Chapter {number} {i}. {TEXT[:300]}" for i in range(turn))
                    body = {"model": "demo", "prompt": prompt, "max_tokens": 2, "stream": True}
                    body["stream_options"] = {"include_usage": True}
                    lines = router.post("/v1/completions", body).text.splitlines()
                    usage = json.loads([line for line in lines if line.startswith("data: {")][-1][6:])["usage"]
                    num_prompt += usage["prompt_tokens"]
                    num_cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            return num_cached / num_prompt

    by_prefix, by_turns = share("prefix", "first"), share("round-robin", "second")
    assert by_prefix > 0.5
    assert by_prefix > 1.5 * by_turns


def test_load_is_reported_and_read(servers):
    report = servers[0].get("/load").json()
    assert report["kv_blocks_total"] == report["kv_blocks_free"] == 512
    assert (report["running"], report["waiting"], len(report["replicas"])) == (0, 0, 1)
    with routing(*servers, options=("--admin-key", "k")) as router:

        def listed():
            return router.get("/router/backends", headers={"authorization": "Bearer k"}).json()["backends"]

        router.wait_for(lambda: all(one["load"] for one in listed()))
        assert {one["load"]["kv_blocks_total"] for one in listed()} == {512}
        assert all(one["models"] == ["demo"] for one in listed())


def test_stored_response_is_continued_where_it_is(servers):
    with routing(*servers, options=("--policy", "round-robin")) as router:
        made = [router.post("/v1/responses", {"model": "demo", "input": "Hi", "max_output_tokens": 4}).json() for _ in range(3)]
        for one in made:
            assert router.get(f"/v1/responses/{one['id']}").json()["id"] == one["id"]
            body = {"model": "demo", "input": "And?", "max_output_tokens": 4, "previous_response_id": one["id"]}
            assert router.post("/v1/responses", body).status_code == 200


def test_client_that_goes_frees_the_server(servers):
    with routing(*servers) as router:
        body = {"model": "demo", "prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", router.url + "/v1/completions", json=body, timeout=60) as response:
            next(response.iter_raw())
        router.wait_for(lambda: all(server.is_idle() for server in servers))
        assert sum(server.metric("quire:stream_aborts_total", reason="disconnect") for server in servers) >= 1


def test_killed_server_is_left_out_and_comes_back(servers):
    victim = ServerProcess().wait_ready()
    try:
        with routing(servers[0], victim, options=("--policy", "round-robin")) as router:
            statuses = []
            stop = threading.Event()

            def ask():
                while not stop.is_set():
                    body = {"model": "demo", "prompt": "a", "max_tokens": 2}
                    statuses.append(router.post("/v1/completions", body).status_code)

            asking = threading.Thread(target=ask)
            asking.start()
            router.wait_for(lambda: len(statuses) > 4)
            port = victim.port
            victim.stop(signal.SIGKILL)
            router.wait_for(lambda: router.num_ready() == 1)
            num = len(statuses)
            router.wait_for(lambda: len(statuses) > num + 4)
            again = ServerProcess("--port", str(port))
            try:
                router.wait_for(lambda: router.num_ready() == 2, timeout_s=120)
                before = router.metric("requests_total", backend=f"127.0.0.1:{port}", code="200")
                router.wait_for(lambda: router.metric("requests_total", backend=f"127.0.0.1:{port}", code="200") > before)
            finally:
                stop.set()
                asking.join(60)
                again.kill()
            assert set(statuses) == {200}
    finally:
        victim.kill()


def test_router_lets_what_runs_end_before_it_stops(servers):
    with routing(*servers) as router:
        body = {"model": "demo", "prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", router.url + "/v1/completions", json=body, timeout=60) as response:
            pieces = response.iter_raw()
            data = next(pieces)
            router.process.send_signal(signal.SIGTERM)
            data += b"".join(pieces)
        assert data.endswith(b"data: [DONE]\n\n")
        assert router.process.wait(30) == 0
