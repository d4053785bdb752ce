"""EngineClient with the real engine process and the bundled demo model."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from quire import LLM
from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.serving.engine_client.client import EngineClient
from quire.serving.engine_client.supervisor import LinkOptions
from quire.serving.errors import ApiError
from tests.unit.serving.engine_client.test_client_faults import read
from tests.unit.serving.http.shell import until

OPTIONS = {"num_kv_blocks": 256, "max_num_seqs": 16, "num_threads": 1}
TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def client(loop):
    async def make():
        client = EngineClient(EngineConfig(model="demo", **OPTIONS), LinkOptions(first_delay_s=0.02, log_level="WARNING"))
        await client.start()
        return client

    client = loop.run(make())
    yield client
    loop.run(client.close())


def request(name, prompt=(5, 6, 7), **params):
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params}),
        seed=3,
        eos_token_ids=frozenset({0}),
        arrival_time_s=time.monotonic(),
    )


def tokens_of(deltas):
    return [token_id for delta in deltas for choice in delta.choices for token_id in choice.token_ids]


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def test_fifty_at_once_get_what_generate_gives(loop, client):
    prompts = [[n + 1, 2 * n + 3, 5 * n + 7] for n in range(50)]

    async def scenario():
        return await asyncio.gather(*(read(client.submit(request(f"r{n}", p))) for n, p in enumerate(prompts)))

    answers = loop.run(scenario())
    plain = LLM("demo", **OPTIONS)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    expected = plain.generate(prompts, params, use_tqdm=False)
    plain.close()
    assert [tokens_of(deltas) for deltas in answers] == [output.outputs[0].token_ids for output in expected]
    texts = ["".join(choice.text for delta in deltas for choice in delta.choices) for deltas in answers]
    assert texts == [output.outputs[0].text for output in expected]


def test_invalid_requests_leave_the_others_alone(loop, client):
    async def scenario():
        good = client.submit(request("good", max_tokens=50))
        long, unknown = client.submit(request("long", [1] * 2000)), client.submit(request("unknown", [99999]))
        assert [(await one.next()).error_param for one in (long, unknown)] == ["prompt", "prompt_token_ids"]
        return tokens_of(await read(good))

    assert len(loop.run(scenario())) == 50


def test_abort_frees_the_blocks_within_a_step(loop, client):
    reports = []

    async def scenario():
        client.on_step.append(lambda message: reports.append(message.report))
        running = client.submit(request("a", max_tokens=900))
        await running.next()
        client.abort("a")
        assert (await read(running))[-1].choices[0].finish_reason == "abort"
        await read(client.submit(request("b", max_tokens=1)))
        client.on_step.clear()

    loop.run(scenario())
    assert reports[-1].num_free_blocks == 256


def test_watch_shows_who_holds_which_blocks(loop, client):
    reports = []

    async def scenario():
        client.on_kv.append(reports.append)
        client.watch(30)
        running = client.submit(request("held", [9] * 40, max_tokens=900))
        await until(lambda: any(len(report.blocks.get("held", ())) >= 3 for report in reports))
        client.abort("held")
        await read(running)
        reports.clear()
        await until(lambda: reports and not reports[-1].blocks and reports[-1].cached)
        client.watch(0)
        client.on_kv.clear()

    loop.run(scenario())
    assert reports[-1].num_blocks == 256


@pytest.mark.slow
def test_idle_engine_takes_next_to_no_processor_time(loop, client):
    async def scenario():
        await asyncio.sleep(0.1)
        before, began_s = cpu_seconds(client.pid), time.monotonic()
        await asyncio.sleep(1.5)
        return (cpu_seconds(client.pid) - before) / (time.monotonic() - began_s)

    assert loop.run(scenario()) < 0.1


def test_ctrl_c_and_sigterm_are_the_servers_to_decide(loop, client):
    async def scenario():
        pid = client.pid
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        assert len(tokens_of(await read(client.submit(request("a"))))) == 8
        assert client.pid == pid

    loop.run(scenario())


# In decode an engine is killed by the gateway's test, and by that of a whole server.
def test_readers_hear_at_once_and_the_next_request_succeeds_when_the_engine_is_killed_in_prefill(loop, client):
    async def scenario():
        pid = client.pid
        running = [client.submit(request(f"r{n}", [n + 1] * 100, max_tokens=900)) for n in range(16)]
        os.kill(pid, signal.SIGKILL)
        errors = await asyncio.gather(*map(read, running), return_exceptions=True)
        assert client.state == "restarting"  # they need not wait for the next engine
        assert {(type(error), error.status, error.code) for error in errors} == {(ApiError, 503, "engine_error")}
        await until(lambda: client.state == "ready")
        assert client.pid != pid
        assert len(tokens_of(await read(client.submit(request("r0"))))) == 8

    loop.run(scenario())


@pytest.mark.slow
def test_start_raises_the_engines_own_error():
    async def main():
        client = EngineClient(EngineConfig(model="demo", num_kv_blocks=10**9), LinkOptions(log_level="CRITICAL"))
        with pytest.raises(ConfigError, match="does not fit"):
            await client.start()
        await client.close()

    asyncio.run(main())


def test_the_servers_side_loads_no_torch():
    import subprocess

    code = "import quire.serving.engine_client.client, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


@pytest.mark.parametrize("level", [1, 2])
def test_requests_are_refused_while_the_engine_sleeps_and_tokens_are_the_same_afterwards(loop, client, level):
    async def go():
        states = []
        client.on_state.append(states.append)
        expected = await read(client.submit(request("before")))
        running = client.submit(request("running", max_tokens=500))
        await client.sleep(level)
        assert (await read(running))[-1].choices[0].finish_reason == "abort"
        with pytest.raises(ApiError, match="asleep: POST /wake_up") as refused:
            client.submit(request("refused"))
        assert refused.value.status == 503
        assert client.sleep_level == level
        await client.wake_up()
        found = await read(client.submit(request("after")))
        client.on_state.remove(states.append)
        assert states == ["sleeping", "ready"]
        return expected, found

    expected, found = loop.run(go())
    assert [token for delta in found for token in delta.choices[0].token_ids] == [
        token for delta in expected for token in delta.choices[0].token_ids
    ]
