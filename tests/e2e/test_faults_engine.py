"""The engine is killed, or stops: every client is told at once, and a new engine takes over."""

import asyncio
import contextlib
import os
import signal

import pytest

from tests.e2e.batching import ended_batch, start_batch
from tests.e2e.server_process import ServerProcess, serving
from tests.e2e.wire import PROMPT, Wire, assert_recovered, completion

NUM_STREAMS = 24
MAX_TOKENS = 900
LONG_PROMPT = [5 + n % 3000 for n in range(1000)]


@pytest.fixture(scope="module")
def server():
    # Few tokens a step: a long prompt then takes long enough to be met in the middle.
    options = (
        "--watchdog-timeout",
        "3",
        "--max-restarts",
        "1000",
        "--restart-window",  # the wait before a restart doubles with each one in it
        "1",
        "--no-page",
        "--max-num-seqs",
        "32",
        "--max-num-batched-tokens",
        "64",
    )
    with serving(*options) as running:
        yield running


def harm(server, number):
    """Send a signal to the engine and return what it was."""
    pid = server.engine_pid()
    os.kill(pid, number)
    return pid


@contextlib.contextmanager
def stopping(server):
    try:
        yield
    finally:
        server.kill()


async def break_decode(server, number):
    """Harm the engine while streams and unary requests decode; return (streams, unary answers, /ready, /health)."""
    streams = await asyncio.gather(*[Wire.stream(server, MAX_TOKENS) for _ in range(NUM_STREAMS)])
    unary = [asyncio.create_task(Wire.ask(server, MAX_TOKENS)) for _ in range(4)]
    await asyncio.gather(*[wire.read_event() for wire in streams])
    await asyncio.to_thread(server.wait_for, lambda: server.metric("quire:num_requests_running") == NUM_STREAMS + 4)
    harm(server, number)
    await asyncio.gather(*[wire.read_rest() for wire in streams])
    ready, health = await asyncio.gather(*[asyncio.to_thread(server.get, path) for path in ("/ready", "/health")])
    return streams, await asyncio.gather(*unary), ready, health


@pytest.mark.slow  # unit tests of the link and of the gateway kill engines every time
@pytest.mark.parametrize(
    "number, reason",
    [
        (signal.SIGKILL, "SIGKILL"),
        (signal.SIGSTOP, "the engine hangs"),
    ],
)
def test_every_client_is_told_when_the_engine_ends_in_decode(server, number, reason):
    num_restarts = server.metric("quire:engine_restarts_total")
    streams, unary, ready, health = asyncio.run(break_decode(server, number))
    assert all(wire.status == 200 for wire in streams)
    assert [wire.error["code"] for wire in streams] == ["engine_error"] * NUM_STREAMS
    assert all(1 <= len(wire.events) - 2 < MAX_TOKENS for wire in streams)
    assert [status for status, _, _ in unary] == [503] * 4
    assert all(int(headers["retry-after"]) >= 1 and body["error"]["code"] == "engine_error" for _, headers, body in unary)
    assert ready.status_code == 503
    assert health.status_code == 503
    assert reason in health.json()["error"]
    server.wait_ready()
    health = server.get("/health")
    assert health.status_code == 200
    assert reason in health.json()["last_error"]
    assert "error" not in health.json()
    assert server.metric("quire:engine_restarts_total") == num_restarts + 1
    whole = server.post("/v1/completions", completion(MAX_TOKENS)).json()["choices"][0]["text"]
    assert all(wire.text and whole.startswith(wire.text) for wire in streams)
    assert_recovered(server)


@pytest.mark.slow
def test_every_client_gets_503_when_the_engine_is_killed_in_prefill(server):
    async def go():
        prompts = [[7 + n, *LONG_PROMPT] for n in range(NUM_STREAMS)]
        wires = await asyncio.gather(*[Wire.stream(server, 8, prompt=prompt) for prompt in prompts])
        await asyncio.to_thread(server.wait_for, lambda: server.metric("quire:batch_prefill_tokens") > 0)
        harm(server, signal.SIGKILL)
        # Those whose prompt was not through yet have had no status: theirs is the error's.
        statuses = []
        for wire in wires:
            await wire.read_head()
            statuses.append(wire.status)
            if wire.status == 503:
                assert int(wire.headers["retry-after"]) >= 1
            else:
                assert (await wire.read_rest()).error or wire.is_complete
            wire.close()
        return statuses

    statuses = asyncio.run(go())
    assert set(statuses) <= {200, 503}
    assert statuses.count(503) > NUM_STREAMS // 2
    assert_recovered(server)


@pytest.mark.slow
def test_server_stays_whole_when_the_engine_is_killed_while_it_loads(server):
    harm(server, signal.SIGKILL)
    server.wait_for(lambda: server.metric("quire:engine_state", state="restarting") == 1)
    pid = server.wait_for(server.engine_pid)
    os.kill(pid, signal.SIGKILL)
    answer = server.post("/v1/completions", completion(1))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_unavailable"
    assert int(answer.headers["retry-after"]) >= 1
    assert_recovered(server)


@pytest.mark.slow
def test_batch_lines_run_once_when_the_engine_is_killed_in_mid_batch(server):
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": completion(60, prompt=f"{PROMPT} {n}")}
        for n in range(200)
    ]
    batch_id = start_batch(server, lines)
    server.wait_for(lambda: server.get(f"/v1/batches/{batch_id}").json()["request_counts"]["completed"] > 5)
    harm(server, signal.SIGKILL)
    ended = server.wait_for(lambda: ended_batch(server, batch_id))
    assert ended["request_counts"] == {"total": 200, "completed": 200, "failed": 0}
    assert_recovered(server)


@pytest.mark.slow
def test_server_ends_with_the_reason_when_the_engine_keeps_dying():
    server = ServerProcess("--max-restarts", "0", "--no-page")
    with stopping(server):
        server.wait_ready()
        harm(server, signal.SIGKILL)
        assert server.process.wait(30) == 1
        assert "the server ends: the engine's process ended: killed by SIGKILL" in server.whole_log()


@pytest.mark.slow
def test_server_ends_at_once_when_the_model_cannot_be_loaded():
    server = ServerProcess("--max-model-len", "100000000", "--no-page", model="demo")
    with stopping(server):
        assert server.process.wait(60) == 1
        assert "the server ends: max_model_len" in server.whole_log()
        assert server.whole_log().count("max_model_len is 100000000") == 1
