"""EngineClient and Supervisor against an engine process that fails as it is told."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import uvloop

from quire.base.errors import ConfigError, WorkerError
from quire.contracts.config import EngineConfig
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.serving.config import ServerConfig
from quire.serving.engine_client.client import EngineClient
from quire.serving.engine_client.messages import ChoiceDelta, RequestDelta, StepOutputs
from quire.serving.engine_client.subscription import Subscription
from quire.serving.engine_client.supervisor import LinkOptions
from quire.serving.errors import ApiError
from tests.no_threads import no_threads
from tests.ranks import is_alive, wait_until
from tests.unit.serving.engine_client import fake_engine as fake
from tests.unit.serving.http.shell import until

COMMAND = (sys.executable, str(Path(fake.__file__)))
WATCHDOG_S = 1.2  # the fake engine beats 20 times a second: on a busy machine it must not seem dead


def options(**changes):
    fast = {"first_delay_s": 0.02, "watchdog_timeout_s": 30.0, "start_timeout_s": 200.0, "log_level": "CRITICAL"}
    return LinkOptions(**{"command": COMMAND, **fast, **changes})


def request(name="a", code=1, max_tokens=5, **changes):
    return Request(request_id=name, prompt_token_ids=(code,), params=SamplingParams(max_tokens=max_tokens), seed=0, **changes)


async def read(subscription):
    deltas = [await subscription.next()]
    while not deltas[-1].finished:
        deltas.append(await subscription.next())
    return deltas


def text_of(deltas):
    return "".join(choice.text for delta in deltas for choice in delta.choices)


def counted(max_tokens):
    return "".join(f"{n} " for n in range(1, max_tokens + 1))


def with_client(scenario, model="fake", config=None, loop_factory=None, **changes):
    """Run a scenario with a started client, and close it."""

    async def main():
        client = EngineClient(EngineConfig(model=model, **(config or {})), options(**changes))
        try:
            await client.start()
            await asyncio.wait_for(scenario(client), 250)
        finally:
            await client.close()
        assert client.num_unfinished == 0

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


@pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_answers_come_whole_and_in_order_when_many_ask(loop_factory):
    async def scenario(client):
        subscriptions = [client.submit(request(f"r{n}", max_tokens=n + 1)) for n in range(50)]
        answers = await asyncio.gather(*map(read, subscriptions))
        assert [text_of(deltas) for deltas in answers] == [counted(n + 1) for n in range(50)]
        assert client.info.model == "fake"
        assert client.heartbeat_age_s < 10

    with_client(scenario, loop_factory=loop_factory)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("code", "shown", "in_full"),
    [
        (fake.KILL, "killed by SIGKILL", "the engine's process ended: killed by SIGKILL"),
        (fake.RAISE, "RuntimeError: no block for '...' in <path>, asked with ...", f"RuntimeError: {fake.RAISED}"),
    ],
    ids=["killed", "raising"],
)
def test_every_reader_hears_why_at_once_and_the_next_request_succeeds_when_the_engine_ends(code, shown, in_full):
    async def scenario(client):
        states = []
        client.on_state.append(states.append)
        first_pid = client.pid
        running = [client.submit(request(f"r{n}", max_tokens=100_000)) for n in range(20)]
        await asyncio.gather(*(subscription.next() for subscription in running))
        running.append(client.submit(request("bad", code)))
        errors = await asyncio.gather(*map(read, running), return_exceptions=True)
        assert states == ["restarting"]  # they need not wait for the next engine
        assert {(type(error), error.status, error.code) for error in errors} == {(ApiError, 503, "engine_error")}
        assert "secret" not in str(errors[0])
        assert shown in str(errors[0])
        with pytest.raises(ApiError, match="started again"):
            client.submit(request("early"))
        await until(lambda: client.state == "ready")
        assert text_of(await read(client.submit(request("bad", 1)))) == counted(5)
        assert client.pid != first_pid
        assert not is_alive(first_pid)
        assert states == ["restarting", "ready"]
        assert client.last_error == in_full

    with_client(scenario)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", ["stopped", "hanging", "without progress"])
def test_watchdog_ends_an_engine_that_makes_no_progress(fault):
    async def scenario(client):
        pid = client.pid
        subscription = client.submit(
            request("a", {"hanging": fake.HANG, "without progress": fake.NO_PROGRESS}.get(fault, 1), 10**6)
        )
        if fault == "stopped":
            await subscription.next()
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ApiError) as caught:
            await read(subscription)
        assert caught.value.code == "engine_error"
        await until(lambda: client.state == "ready")
        assert not is_alive(pid)
        assert text_of(await read(client.submit(request("b")))) == counted(5)

    with_client(scenario, watchdog_timeout_s=WATCHDOG_S)


@pytest.mark.slow
def test_blocked_event_loop_is_not_taken_for_a_dead_engine():
    async def scenario(client):
        pid = client.pid
        running = client.submit(request("a", max_tokens=600))
        await running.next()
        time.sleep(1.5 * WATCHDOG_S)
        assert text_of(await read(running)).endswith("600 ")
        await asyncio.sleep(0.3)
        assert client.pid == pid

    with_client(scenario, watchdog_timeout_s=WATCHDOG_S)


@pytest.mark.parametrize("code", [fake.GAP, fake.GARBAGE, fake.FOREIGN])
def test_all_that_run_fail_and_later_ones_do_not_when_an_output_is_lost(code):
    async def scenario(client):
        pid = client.pid
        running = client.submit(request("a", max_tokens=100_000))
        await running.next()
        bad = client.submit(request("bad", code, 100_000))
        for subscription in (running, bad):
            with pytest.raises(ApiError, match="outputs were lost"):
                await read(subscription)
        await until(lambda: not client.aborts)
        assert text_of(await read(client.submit(request("a")))) == counted(5)
        assert client.pid == pid

    with_client(scenario)


def test_output_that_comes_twice_counts_once():
    async def scenario(client):
        running = client.submit(request("a", max_tokens=300))
        first = await running.next()
        assert text_of(await read(client.submit(request("b", fake.TWICE)))) == counted(5)
        assert text_of([first, *await read(running)]) == counted(300)
        assert client.supervisor.engine.reader.num_rejected == 1

    with_client(scenario)


def test_only_the_lost_request_fails_when_a_command_does_not_arrive():
    async def scenario(client):
        running = client.submit(request("a", max_tokens=100))
        first = await running.next()
        with pytest.raises(ApiError, match="the request was lost"):
            await client.submit(request("bad", fake.LOSE_COMMAND)).next()
        assert text_of([first, *await read(running)]) == counted(100)

    with_client(scenario)


def test_request_fails_when_its_command_was_the_last_one_and_is_lost(monkeypatch):
    monkeypatch.setattr("quire.serving.engine_client.client._COMMAND_TIMEOUT_S", 0.2)

    async def scenario(client):
        supervisor, send = client.supervisor, client.supervisor.send
        writer = supervisor.engine.writer
        supervisor.send = lambda message: (writer.num_sent, writer.write(message))[0]  # numbered, and dropped
        lost = client.submit(request("a"))
        supervisor.send = send
        with pytest.raises(ApiError, match="the request was lost"):  # a heartbeat tells
            await lost.next()
        monkeypatch.undo()
        assert text_of(await read(client.submit(request("b")))) == counted(5)

    with_client(scenario)


def test_slow_reader_is_aborted_and_the_others_go_on():
    async def scenario(client):
        slow = client.submit(request("slow", fake.FLOOD, 10**6))
        other = client.submit(request("a", max_tokens=300))
        assert text_of(await read(other)) == counted(300)
        await until(lambda: "slow" not in client.subscriptions and not client.aborts)
        with pytest.raises(ApiError) as caught:
            await slow.next()
        assert caught.value.code == "slow_reader"

    with_client(scenario, slow_reader_bytes=100_000)


def test_reader_that_never_comes_is_aborted_by_age():
    async def scenario(client):
        slow = client.submit(request("slow", max_tokens=10**6))
        await until(lambda: slow.is_finished)
        with pytest.raises(ApiError, match="not read as fast"):
            await slow.next()

    with_client(scenario, slow_reader_s=0.3)


def test_abort_brings_the_last_delta_and_frees_the_name():
    async def scenario(client):
        running = client.submit(request("a", max_tokens=10**6))
        await running.next()
        with pytest.raises(ApiError, match="in use"):
            client.submit(request("a"))
        client.abort("a")
        client.abort("a")
        client.abort("unknown")
        assert (await read(running))[-1].choices[0].finish_reason == "abort"
        assert text_of(await read(client.submit(request("a")))) == counted(5)

    with_client(scenario)


def test_what_cannot_be_sent_is_refused_and_harms_nobody():
    async def scenario(client):
        for bad, match in (
            (request("x", prompt="\ud800"), "cannot be taken in"),
            (Request(request_id="x", prompt_token_ids=(1,), params=SamplingParams(top_k=2**70), seed=0), "64 bits"),
            (Request(request_id="x", prompt_token_ids=(2**40,), params=SamplingParams(), seed=0), "32 bits"),
            (request("x", prompt="x" * (65 << 20)), "at most"),
        ):
            with pytest.raises(ApiError, match=match) as caught:
                client.submit(bad)
            assert caught.value.status == 400
        assert text_of(await read(client.submit(request("x")))) == counted(5)

    with_client(scenario)


def test_listener_that_raises_harms_nobody():
    async def scenario(client):
        steps = []
        client.on_step += [lambda message: 1 / 0, steps.append]
        assert text_of(await read(client.submit(request("a")))) == counted(5)
        assert sum(message.report is not None for message in steps) == 5

    with_client(scenario)


def test_bug_in_the_client_leaves_nobody_waiting(monkeypatch):
    async def scenario(client):
        running = [client.submit(request(f"r{n}", max_tokens=10**6)) for n in range(3)]
        await asyncio.gather(*(one.next() for one in running))
        monkeypatch.setattr(client, "_deliver", lambda delta, now: 1 / 0)
        for one in running:
            with pytest.raises(ApiError, match="outputs were lost"):
                await read(one)
        monkeypatch.undo()
        assert text_of(await read(client.submit(request("a")))) == counted(5)

    with_client(scenario)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "model, kind, match",
    [
        ("fail-config", ConfigError, "^max_model_len is wrong$"),
        ("fail-exit", WorkerError, "while it loaded the model: exit status 7"),
        ("fail-hang", WorkerError, "start_timeout_s"),
        ("fail-version", ConfigError, "version"),
    ],
)
def test_start_raises_what_the_engine_says(model, kind, match):
    async def main():
        client = EngineClient(EngineConfig(model=model), options(start_timeout_s=1.5 if model == "fail-hang" else 200))
        with pytest.raises(kind, match=match):
            await client.start()
        assert client.state == "failed"
        assert client.pid is None
        with pytest.raises(ApiError, match="has failed"):
            client.submit(request())
        await client.close()

    asyncio.run(main())


def test_start_raises_when_the_process_cannot_be_made():
    async def main():
        client = EngineClient(EngineConfig(model="fake"), LinkOptions(command=("/nonexistent/python",)))
        with pytest.raises(WorkerError, match="could not be started"):
            await client.start()
        await client.close()

    asyncio.run(main())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model, num_restarts, match", [("fail-config", 1, "is wrong"), ("fail-exit", 3, "exit status 7")])
def test_supervisor_gives_up_when_restarts_do_not_help(model, num_restarts, match, tmp_path):
    async def scenario(client):
        states = []
        client.on_state.append(states.append)
        running = client.submit(request("a", fake.KILL))
        with pytest.raises(ApiError, match="SIGKILL"):
            await running.next()
        await until(lambda: client.state == "failed")
        assert client.num_restarts == num_restarts
        assert match in client.last_error
        assert states[-1] == "failed"

    with_client(scenario, model, {"tokenizer": str(tmp_path / "started")}, max_restarts=3)


def test_close_leaves_neither_process_nor_files(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pids = []

    async def main(is_hanging):
        client = EngineClient(EngineConfig(model="fake"), options(stop_timeout_s=0.3))
        await client.start()
        assert list(tmp_path.iterdir()) == []  # from now on nothing is left, whoever is killed
        pids.append(client.pid)
        running = client.submit(request("a", fake.HANG if is_hanging else 1, 10**6))
        await asyncio.sleep(0.05)
        await client.close()
        await client.close()
        assert client.state == "closed"
        with pytest.raises(ApiError):
            await read(running)

    asyncio.run(main(is_hanging=False))
    asyncio.run(main(is_hanging=True))
    assert not any(map(is_alive, pids))
    assert list(tmp_path.iterdir()) == []


def test_close_while_the_engine_starts_ends_it():
    async def main():
        client = EngineClient(EngineConfig(model="fail-hang"), options())
        starting = asyncio.create_task(client.start())
        await until(lambda: client.pid is not None)
        pid = client.pid
        await client.close()
        with pytest.raises(WorkerError, match="closed"):
            await starting
        assert not is_alive(pid)

    asyncio.run(main())


_SERVER = """
import asyncio, os, sys
sys.path.insert(0, {root!r})
from tests.unit.serving.engine_client.test_client_faults import EngineClient, EngineConfig, options, request

async def main():
    client = EngineClient(EngineConfig(model="fake"), options())
    await client.start()
    client.submit(request("a", {code}, 10**6))
    await asyncio.sleep(0.1)
    print(client.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("code", [1, fake.HANG], ids=["running", "hanging"])
def test_engine_ends_when_the_server_is_killed(code):
    import subprocess

    root = str(Path(__file__).resolve().parents[4])
    server = subprocess.Popen([sys.executable, "-c", _SERVER.format(root=root, code=code)], stdout=subprocess.PIPE, text=True)
    pid = int(server.stdout.readline())
    assert is_alive(pid)
    server.kill()
    server.wait()
    server.stdout.close()
    assert wait_until(lambda: not is_alive(pid))


def test_what_waits_for_a_reader_goes_to_it_in_one_piece_when_the_loop_is_late():
    async def main():
        client, taken = EngineClient(EngineConfig(model="fake"), options()), {}
        for n in range(64):
            found = client.subscriptions[f"r{n}"] = Subscription(f"r{n}", n, 10**6, 60.0)
            found.attach_sink(lambda delta: taken.setdefault(delta.request_id, []).append(text_of([delta])) is None)
        readers = [asyncio.create_task(one.next()) for one in client.subscriptions.values()]
        await asyncio.sleep(0)
        for step in (1, 2, 3):  # no turn of the loop comes between
            deltas = [RequestDelta(f"r{n}", [ChoiceDelta(0, f"{step} ", [step])], False) for n in range(64)]
            client.on_message(StepOutputs(deltas), 0.0)
        while client.undelivered:
            await asyncio.sleep(0)
        for reader in readers:
            reader.cancel()
        assert taken == {f"r{n}": ["1 ", "2 3 "] if n < 32 else ["1 2 3 "] for n in range(64)}

    asyncio.run(main())


RAISING = """
import sys
from quire.serving.engine_client.process import run
def load(config): raise RuntimeError("cannot load")
sys.exit(run(load))
"""


def test_the_engines_log_has_one_object_a_line_when_the_server_logs_json(capfd):
    async def scenario(client):
        raise AssertionError

    server = LinkOptions.of(ServerConfig(log_format="json"), "INFO")
    command = (sys.executable, "-c", RAISING)
    options = {"command": command, "log_format": server.log_format, "log_level": server.log_level, "max_restarts": 0}
    with no_threads("quire-engine-log"), pytest.raises(WorkerError, match="could not be started: can't start new thread"):
        with_client(scenario, **options)
    capfd.readouterr()
    with pytest.raises(WorkerError):
        with_client(scenario, **options)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert "RuntimeError: cannot load" in lines[0]["exception"]
