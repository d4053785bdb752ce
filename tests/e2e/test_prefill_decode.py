"""A decode server whose long prompts are computed by a prefill server, over HTTP, also when that one is killed."""

import contextlib
import os
import signal
import time

import httpx
import pytest

pytest.importorskip("uvicorn", reason="needs quire[server]")

from tests.e2e.router_process import RouterProcess, routing
from tests.e2e.server_process import serving

pytestmark = pytest.mark.slow

LONG = "You are a careful clerk who answers briefly and never forgets what was said before in the same talk. " * 12


@contextlib.contextmanager
def serving_apart(tmp_path, of_prefill=(), of_decode=()):
    """Yield a prefill server and a decode server, with options of each."""
    common = ("--num-threads", "1", "--transfer-secret-file", str(tmp_path / "secret"))
    address = f"unix:{tmp_path}/pages"
    with (
        serving("--role", "prefill", "--prefill-listen", address, *common, *of_prefill) as prefill,
        serving("--role", "decode", "--prefill-url", address, "--prefill-min-tokens", "64", *common, *of_decode) as decode,
    ):
        yield prefill, decode


def ask(server, name, **more):
    messages = [{"role": "system", "content": f"{name} {LONG}"}, {"role": "user", "content": "Hello"}]
    body = {"model": "demo", "max_tokens": 12, "temperature": 0.8, "seed": 5, "logprobs": True, "messages": messages, **more}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return [(one["message"], one["logprobs"]) for one in found["choices"]], found["usage"]


def metric(server, name, **labels):
    return server.metric(f"quire:{name}", **labels)


def test_answers_are_those_of_one_server_and_the_hand_over_is_counted(tmp_path):
    """Between engines of several processes, of another number each."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    constrained = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    cases = (("One.", {}), ("Two.", {"n": 2}), ("Three.", constrained))
    with serving("--num-threads", "1") as server:
        expected = [ask(server, name, **more)[0] for name, more in cases]
    with serving_apart(tmp_path, ("--tensor-parallel-size", "2"), ("--pipeline-parallel-size", "3")) as (prefill, decode):
        found = [ask(decode, name, **more) for name, more in cases]
        assert [answer for answer, _ in found] == expected
        assert min(usage["prompt_tokens_details"]["cached_tokens"] for _, usage in found) >= 200
        decode.wait_for(lambda: metric(decode, "kv_transfers_total", outcome="complete") == 3, timeout_s=30)
        num_pages = metric(decode, "kv_tier_hit_pages_total", tier="peer")
        assert num_pages == metric(decode, "kv_tier_loaded_pages_total", tier="peer") > 36
        prefill.wait_for(lambda: metric(prefill, "kv_tier_saved_pages_total", tier="peer") == num_pages, timeout_s=30)
        prefill.wait_for(lambda: metric(prefill, "kv_tier_pages", tier="peer") == 0, timeout_s=30)
        assert decode.get("/health").json()["transfers"]["complete"] == 3


def test_prefill_server_takes_no_requests_of_clients(tmp_path):
    with serving("--role", "prefill", "--prefill-listen", f"unix:{tmp_path}/pages", "--num-threads", "1") as server:
        answer = server.post("/v1/completions", {"model": "demo", "prompt": "Hello", "max_tokens": 2})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "wrong_role"
        assert "--role prefill" in answer.json()["error"]["message"]


def test_requests_are_served_while_the_prefill_engine_is_away_and_it_is_used_again(tmp_path):
    with serving_apart(tmp_path) as (prefill, decode):
        expected, usage = ask(decode, "One.")
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 200
        os.kill(prefill.engine_pid(), signal.SIGSTOP)
        assert ask(decode, "Two.")[1]["prompt_tokens_details"]["cached_tokens"] < 64
        os.kill(prefill.engine_pid(), signal.SIGKILL)
        assert ask(decode, "Three.")[1]["prompt_tokens_details"]["cached_tokens"] < 64
        prefill.wait_for(lambda: prefill.get("/ready").status_code == 200)

        def is_used():
            number = is_used.number = getattr(is_used, "number", 3) + 1
            return ask(decode, f"{number}.")[1]["prompt_tokens_details"]["cached_tokens"] >= 200

        decode.wait_for(is_used)
        assert ask(decode, "One.")[0] == expected


def test_decode_server_behind_a_router_uses_all_prefill_servers_and_passes_over_a_dead_one(tmp_path):
    common = ("--num-threads", "1", "--num-kv-blocks", "400", "--transfer-secret-file", str(tmp_path / "secret"))
    addresses = [f"unix:{tmp_path}/pages{number}" for number in range(2)]
    of_decode = ("--role", "decode", "--prefill-url", ",".join(addresses), "--prefill-min-tokens", "64")
    with contextlib.ExitStack() as stack:
        prefill = [stack.enter_context(serving("--role", "prefill", "--prefill-listen", one, *common)) for one in addresses]
        decode = stack.enter_context(serving(*of_decode, *common))
        router = stack.enter_context(routing(decode))
        router.wait_for(lambda: router.num_ready() == 1)
        asked = [ask(router, f"{number}.") for number in range(4)]
        decode.wait_for(lambda: metric(decode, "kv_transfers_total", outcome="complete") == 4, timeout_s=30)
        assert all(metric(decode, "kv_peer_transfers_total", peer=one) > 0 for one in addresses)
        assert metric(decode, "kv_peer_wait_seconds") == 0
        engine = prefill[0].engine_pid()
        prefill[0].kill()
        with contextlib.suppress(ProcessLookupError):  # it may have noticed that its server is gone
            os.kill(engine, signal.SIGKILL)
        asked += [ask(router, f"{number}.") for number in range(4, 7)]
        assert all(usage["prompt_tokens_details"]["cached_tokens"] >= 200 for _, usage in asked)
        decode.wait_for(lambda: metric(decode, "kv_transfers_total", outcome="complete") == 7, timeout_s=30)


def test_decode_servers_behind_a_router_use_the_prefill_servers_that_are_registered_there(tmp_path):
    common = ("--num-threads", "1", "--num-kv-blocks", "400", "--transfer-secret-file", str(tmp_path / "secret"))
    addresses = [f"unix:{tmp_path}/pages{number}" for number in range(2)]
    key = {"authorization": "Bearer admin"}
    with contextlib.ExitStack() as stack:
        prefill = [stack.enter_context(serving("--role", "prefill", "--prefill-listen", one, *common)) for one in addresses]
        decode = stack.enter_context(serving("--role", "decode", "--prefill-min-tokens", "64", *common))
        router = RouterProcess(prefill[0], decode, options=("--admin-key", "admin"))
        stack.callback(router.kill)
        router.wait_for(lambda: router.num_ready() == 1)

        def uses(*expected):
            router.wait_for(lambda: decode.get("/load").json()["prefill_urls"] == list(expected), timeout_s=60)

        def is_computed_elsewhere(name):
            return ask(router, name)[1]["prompt_tokens_details"]["cached_tokens"] >= 200

        uses(addresses[0])
        assert all(is_computed_elsewhere(f"{number}.") for number in range(3))
        decode.wait_for(lambda: metric(decode, "kv_peer_transfers_total", peer=addresses[0]) == 3, timeout_s=30)
        router.post("/router/backends", {"url": prefill[1].url}, headers=key)
        uses(*addresses)
        removed = httpx.delete(f"{router.url}/router/backends/{prefill[0].url.removeprefix('http://')}", headers=key)
        assert removed.status_code == 200
        uses(addresses[1])
        assert all(is_computed_elsewhere(f"{number}.") for number in range(3, 6))
        decode.wait_for(lambda: metric(decode, "kv_peer_transfers_total", peer=addresses[1]) == 3, timeout_s=30)
        killed = decode.engine_pids()
        os.kill(killed[0], signal.SIGKILL)  # it is started again, and knows no prefill server then
        router.wait_for(lambda: decode.engine_pids() not in ([], killed) and router.num_ready() == 1)
        uses(addresses[1])
        router.wait_for(lambda: is_computed_elsewhere(f"again {time.monotonic()}"))
        prefill[1].process.terminate()
        uses()
        assert not is_computed_elsewhere("alone")
        assert router.metric("requests_total", backend=prefill[1].url.removeprefix("http://")) == 0
