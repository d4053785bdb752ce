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


def choice_of(stream):
    """Return the choice that the events of a complete stream add up to: each has as many tokens as happened to be ready."""
    *events, done = re.findall(rb"data: (.*)\n\n", stream)
    assert done == b"[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    return {
        "text": "".join(choice["text"] for choice in choices),
        "logprobs": {name: [value for one in logprobs for value in one[name]] for name in logprobs[0]},
        "finish_reason": choices[-1]["finish_reason"],
    }


def test_answers_are_those_of_a_server(servers):
    body = {"model": "demo", "prompt": TEXT, "max_tokens": 12, "temperature": 0, "logprobs": 2}
    with routing(*servers) as router:
        whole = router.post("/v1/completions", body)
        assert (whole.status_code, whole.json()["choices"]) == (200, servers[0].post("/v1/completions", body).json()["choices"])
        choice = whole.json()["choices"][0]
        assert len(choice["logprobs"]["tokens"]) == 12
        streamed = router.post("/v1/completions", {**body, "stream": True})
        assert choice_of(streamed.content) == {name: choice[name] for name in ("text", "logprobs", "finish_reason")}
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

    by_turns = share("round-robin", "turns")
    # On a busy machine a server that was slow just before is predicted to be slow, and some turns go to the other one.
    assert any(share("prefix", salt) > max(0.5, 1.5 * by_turns) for salt in ("first", "second", "third"))


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


def test_model_of_a_request_chooses_the_servers(servers):
    """Two servers of one model and one of another behind one address."""
    with serving(model="demo-draft") as draft, routing(*servers, draft, options=("--alias", "fast=demo-draft")) as router:
        body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        for model, server, served in (
            ("demo", servers[0], "demo"),
            ("demo-draft", draft, "demo-draft"),
            ("fast", draft, "demo-draft"),
        ):
            got = router.post("/v1/completions", {**body, "model": model})
            assert (got.status_code, got.json()["model"]) == (200, served)
            expected = server.post("/v1/completions", {**body, "model": served}).json()
            assert got.json()["choices"] == expected["choices"]
        assert [one["id"] for one in router.get("/v1/models").json()["data"]] == ["demo", "demo-draft", "fast"]
        unknown = router.post("/v1/completions", {**body, "model": "other"})
        assert unknown.status_code == 404
        assert unknown.json()["error"]["message"].endswith("there are: demo, demo-draft, fast")


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


AGE = {"type": "integer", "minimum": 0, "maximum": 99}
PERSON = {"type": "object", "properties": {"age": AGE}, "required": ["age"], "additionalProperties": False}
LONG_LIST = {"type": "array", "items": PERSON, "minItems": 40, "maxItems": 40}
COMPACT = {"json": LONG_LIST, "disable_any_whitespace": True}
RESUMED = {
    "seeded chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Tell me a story."}], "seed": 5, "temperature": 1, "ignore_eos": True},
    ),
    "constrained": (
        "/v1/completions",
        {"prompt": "Ages:", "seed": 3, "temperature": 1, "structured_outputs": COMPACT},
    ),
    "anthropic": ("/v1/messages", {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0}),
}


def streamed(url, path, body, at_first_bytes=None):
    """Return the bytes of a stream; call `at_first_bytes` when some of them have come."""
    data = b""
    with httpx.stream(
        "POST", url + path, json={"model": "demo", "max_tokens": 700, "stream": True, **body}, timeout=120
    ) as got:
        for piece in got.iter_raw():
            data += piece
            if at_first_bytes is not None and data.count(b"\n\n") > 5:
                at_first_bytes()
                at_first_bytes = None
    return data


@pytest.mark.parametrize("name", RESUMED)
def test_stream_of_a_killed_server_goes_on_at_another_one(servers, name):
    """The client reads what it would have read without the death: tokens, text, the end and the usage."""
    path, body = RESUMED[name]
    if path != "/v1/messages":
        body = {**body, "stream_options": {"include_usage": True}}
    expected = streamed(servers[0].url, path, body)
    victim = ServerProcess().wait_ready()
    try:
        with routing(victim, servers[1], options=("--admin-key", "k", "--retry-ratio", "1")) as router:
            other = f"{router.url}/router/backends/{servers[1].url.removeprefix('http://')}"

            def post(action):
                assert httpx.post(f"{other}/{action}", headers={"authorization": "Bearer k"}, timeout=30).status_code == 200

            def kill_victim():
                post("resume")
                victim.process.kill()

            post("drain")  # the stream begins at the victim
            found = streamed(router.url, path, body, kill_victim)
            assert router.metric("resumes_total") == 1
            assert answer_of(found) == answer_of(expected)
            if name == "constrained":
                assert len(json.loads(answer_of(found)[0])) == 40
            assert b"quire-tokens" not in found
            assert len(set(re.findall(rb'"id":"[a-z]+[-_][^"]+"', found))) == 1
    finally:
        victim.kill()


def answer_of(stream):
    """Return the text, the ends and the usage that the events of a stream in any of the three APIs tell."""
    text, ends, usage = "", [], {}
    *lines, last = [line for line in stream.decode().splitlines() if line.startswith("data: ")]
    for line in lines if last == "data: [DONE]" else [*lines, last]:
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        delta = event.get("delta") or {}
        text += delta.get("text") or ""
        ends += [event["type"]] if event.get("type") == "message_stop" else []
        ends += [delta[name] for name in ("stop_reason", "stop_sequence") if name in delta]
        for choice in event.get("choices") or ():
            text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
        usage |= event.get("usage") or {}
    assert ends
    num_tokens = {name: count for name, count in usage.items() if name.endswith("_tokens") and "cache" not in name}
    assert num_tokens
    return text, ends, num_tokens, last == "data: [DONE]"


def test_exact_index_sends_a_prompt_where_its_blocks_are(tmp_path):
    """What a server has computed for others is found by its events; without them the router would not know."""

    def events(number):
        return f"ipc://{tmp_path}/e{number}", f"ipc://{tmp_path}/r{number}"

    def options(number, encoding):
        endpoint, replay = events(number)
        encoding = ("--kv-events-encoding", encoding)
        return ("--kv-events-endpoint", endpoint, "--kv-events-replay-endpoint", replay, *encoding)

    with serving(*options(0, "array")) as first, serving(*options(1, "map")) as second:
        sources = [f"{one.url}={','.join(events(number))}" for number, one in enumerate((first, second))]
        more = [word for source in sources for word in ("--kv-events", source)]
        chat = {"model": "demo", "messages": [{"role": "user", "content": TEXT * 2}], "max_tokens": 1, "temperature": 0}
        tokens = list(range(300, 300 + 20 * 16))
        prompt = {"model": "demo", "prompt": tokens, "max_tokens": 1, "temperature": 0}
        assert second.post("/v1/chat/completions", chat).status_code == 200  # not through the router, nor known to it
        with routing(first, second, options=(*more, "--tokenize-timeout", "5")) as router:
            router.wait_for(lambda: router.metric("kv_event_sources", state="live") == 2)
            assert first.post("/v1/completions", prompt).status_code == 200
            router.wait_for(lambda: router.metric("kv_event_blocks", backend=first.url[7:]) >= 20)
            for path, body, most in (("/v1/chat/completions", chat, 16), ("/v1/completions", prompt, 16)):
                usage = router.post(path, body).json()["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - most - 1
            assert router.metric("tokenized_prompts_total", result="done") == 1
