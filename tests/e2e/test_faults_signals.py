"""Signals to the server: running requests end normally, new ones are refused, and no process remains."""

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.server_process import serving
from tests.e2e.wire import Wire, completion
from tests.ranks import is_alive, wait_until

NUM_STREAMS = 16


@pytest.fixture
def start():
    """Return a function that starts a server of the test's own."""
    with_servers = []

    def begin(*options):
        manager = serving("--no-page", *options)
        with_servers.append(manager)
        return manager.__enter__()

    yield begin
    for manager in with_servers:
        manager.__exit__(None, None, None)


async def open_streams(server, max_tokens):
    wires = await asyncio.gather(*[Wire.stream(server, max_tokens) for _ in range(NUM_STREAMS)])
    await asyncio.gather(*[wire.read_event() for wire in wires])
    return wires


async def read_all(wires):
    await asyncio.gather(*[wire.read_rest() for wire in wires])


def is_draining(server):
    return server.get("/ready").json().get("reason") == "draining"


@pytest.mark.slow
def test_streams_finish_and_new_requests_get_503_when_the_server_is_told_to_end(start):
    server = start("--drain-grace", "6")
    pid = server.engine_pid()

    async def go():
        wires = await open_streams(server, 900)
        unary = asyncio.create_task(Wire.ask(server, 900))
        await asyncio.to_thread(server.wait_for, lambda: server.metric("quire:num_requests_running") == NUM_STREAMS + 1)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(server.wait_for, lambda: is_draining(server))
        ready, refused, stored = await asyncio.gather(
            asyncio.to_thread(server.get, "/ready"),
            asyncio.to_thread(server.post, "/v1/completions", completion(1)),
            asyncio.to_thread(server.post, "/v1/batches", {"input_file_id": "a", "endpoint": "b", "completion_window": "24h"}),
        )
        await read_all(wires)
        return wires, await unary, ready, refused, stored

    wires, unary, ready, *refusals = asyncio.run(go())
    assert all(wire.is_complete and len(wire.text) > 0 for wire in wires)
    assert (unary[0], unary[2]["usage"]["completion_tokens"]) == (200, 900)
    assert ready.status_code == 503
    for refused in refusals:
        assert refused.status_code == 503
        assert 1 <= int(refused.headers["retry-after"]) <= 8  # the grace that is left, spread by a quarter
        assert refused.json()["error"]["code"] in ("draining", "server_shutdown")
    assert server.process.wait(30) == 0
    assert not is_alive(pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, numbers",
    [
        pytest.param(("--drain-timeout", "0.2"), [signal.SIGTERM], id="outlasting-the-drain"),
        pytest.param((), [signal.SIGTERM, signal.SIGINT], id="twice"),
    ],
)
def test_streams_end_with_an_error_when_they_cannot_finish(start, options, numbers):
    server = start(*options)
    pid = server.engine_pid()

    async def go():
        wires = await open_streams(server, 1000)
        unary = asyncio.create_task(Wire.ask(server, 1000))
        await asyncio.to_thread(server.wait_for, lambda: server.metric("quire:num_requests_running") == NUM_STREAMS + 1)
        for number in numbers:
            server.process.send_signal(number)
            await asyncio.to_thread(server.wait_for_log, "draining")
        await read_all(wires)
        return wires, await unary

    wires, unary = asyncio.run(go())
    assert [wire.error and wire.error["code"] for wire in wires] == ["server_shutdown"] * NUM_STREAMS
    assert unary[0] == 503
    assert server.process.wait(30) == 0
    assert not is_alive(pid)


@pytest.mark.slow
def test_server_drains_when_it_is_interrupted_once_and_idle_connections_do_not_hold_up_the_end(start):
    server = start()
    client = httpx.Client(base_url=server.url)
    assert client.get("/health").status_code == 200

    async def go():
        wires = await open_streams(server, 300)
        server.process.send_signal(signal.SIGINT)
        await read_all(wires)
        return wires

    assert all(wire.is_complete for wire in asyncio.run(go()))
    assert server.process.wait(30) == 0  # it would keep idle connections for 75 s
    client.close()


@pytest.mark.slow
def test_server_ends_when_it_is_told_to_while_it_loads():
    from tests.e2e.server_process import ServerProcess

    server = ServerProcess("--no-page")
    pid = server.wait_for(server.engine_pid)
    assert server.stop(signal.SIGTERM) == 0
    assert not is_alive(pid)


@pytest.mark.slow
@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
def test_engine_ends_and_the_link_leaves_no_folder_when_the_server_is_killed(start, tmp_path, monkeypatch, is_busy):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = start()
    pid = server.engine_pid()

    async def go():
        wires = await open_streams(server, 1000) if is_busy else []
        server.process.kill()
        for wire in wires:
            wire.close()

    asyncio.run(go())
    server.process.wait()
    assert wait_until(lambda: not is_alive(pid), 60)
    assert [name for name in os.listdir(tmp_path) if not name.startswith("quire-files-")] == []


@pytest.mark.slow
def test_every_line_of_the_log_is_an_object_when_the_engine_writes_and_dies_below_python():
    with serving("--log-format", "json", "--no-page") as server:
        pid = server.engine_pid()
        with Path(f"/proc/{pid}/fd/2").open("w") as pipe:
            pipe.write("written below python\n")
        server.wait_for_log("written below python")
        os.kill(pid, signal.SIGSEGV)
        server.wait_for_log("is started again")
        server.wait_ready()
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.whole_log().splitlines()]
    told = {line["logger"]: line["message"] for line in lines if "below python" in line["message"]}
    assert told == {"quire.engine.output": "written below python"}
