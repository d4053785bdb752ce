"""The gateway with the real client, engine process and the bundled demo model."""

import asyncio
import dataclasses
import os
import random
import signal
import time

import pytest

from quire.contracts.config import EngineConfig
from quire.serving.admission import AdmissionControl
from quire.serving.config import ServerConfig
from quire.serving.engine_client.client import EngineClient
from quire.serving.engine_client.supervisor import LinkOptions
from quire.serving.errors import ApiError
from quire.serving.metrics.server_metrics import ServerMetrics
from quire.serving.request_queue import EngineGateway
from tests.unit.serving.http.shell import until
from tests.unit.serving.request_queue.virtual_engine import make_job

OPTIONS = {"num_kv_blocks": 256, "max_num_seqs": 8, "num_threads": 1}


class Server:
    def __init__(self):
        config = ServerConfig()
        link = LinkOptions(first_delay_s=0.02, log_level="WARNING", slow_reader_bytes=2000, slow_reader_s=0.6)
        self.client = EngineClient(EngineConfig(model="demo", **OPTIONS), link)
        self.admission = AdmissionControl(config, clock=time.monotonic, random=random.Random(0).random)
        self.metrics = ServerMetrics(config, "demo")
        self.gateway = EngineGateway(self.client, self.admission, self.metrics)

    def open(self, name, max_tokens=12, **job):
        return self.gateway.open(make_job(name, 5, max_tokens, arrival_s=time.monotonic(), **job))


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def server(loop):
    async def make():
        server = Server()
        await server.client.start()
        return server

    server = loop.run(make())
    yield server
    loop.run(server.client.close())


async def read(stream):
    tokens = 0
    async with stream:
        async for delta in stream:
            tokens += sum(len(choice.token_ids) for choice in delta.choices)
    return tokens


def value(server, name, *labels):
    return getattr(server.metrics.defined, name).labels(*labels).value


def test_all_are_served_and_counted_when_more_come_than_run(loop, server):
    async def scenario():
        before = value(server, "generation_tokens")
        found = await asyncio.gather(*(read(server.open(f"a{i}", n=1 + i % 2)) for i in range(40)))
        assert all(0 < tokens <= 12 * 2 for tokens in found)
        assert value(server, "generation_tokens") - before == sum(found)
        await until(lambda: server.admission.is_empty)
        text = server.metrics.render()[0].decode()
        assert 'quire:num_requests_running{engine="0",model_name="demo"} 0.0' in text
        assert server.metrics.engines[0].load.flops_per_s() > 0

    loop.run(scenario())


def test_engine_is_told_and_slot_is_free_when_a_reader_leaves(loop, server):
    async def scenario():
        stream = server.open("b", 2000)
        async with stream:
            await anext(stream)
        await until(lambda: server.admission.is_empty and server.client.num_unfinished == 0)

    loop.run(scenario())


def test_request_is_refused_with_400_when_the_engine_cannot_serve_it(loop, server):
    async def scenario():
        stream = server.gateway.open(make_job("c", 5000))
        with pytest.raises(ApiError) as caught:
            await read(stream)
        assert (caught.value.status, caught.value.param) == (400, "prompt")
        await until(lambda: server.admission.is_empty)

    loop.run(scenario())


def test_slow_reader_is_ended_and_counted_when_it_does_not_read(loop, server):
    async def scenario():
        job = make_job("d", 5, 3000, n=8, arrival_s=time.monotonic())  # six times what the cache holds: seconds, on any machine
        params = dataclasses.replace(job.request.params, ignore_eos=True)
        stream = server.gateway.open(dataclasses.replace(job, request=dataclasses.replace(job.request, params=params)))
        async with stream:
            await anext(stream)
            await until(lambda: value(server, "aborts", "slow_reader") == 1)  # a reader that is stuck sees nothing
            with pytest.raises(ApiError) as caught:
                [delta async for delta in stream]
            assert caught.value.code == "slow_reader"
            assert value(server, "aborts", "slow_reader") == 1
        await until(lambda: server.admission.is_empty)

    loop.run(scenario())


@pytest.mark.slow
def test_all_fail_and_later_ones_are_served_when_the_engine_is_killed(loop, server):
    async def scenario():
        tasks = [asyncio.create_task(read(server.open(f"e{i}", 2000))) for i in range(30)]
        await until(lambda: value(server, "running") > 0)
        os.kill(server.client.pid, signal.SIGKILL)
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        errors = [one for one in found if not isinstance(one, int)]
        assert len(errors) >= 20
        assert {error.status for error in errors} == {503}
        assert {error.code for error in errors} == {"engine_error", "engine_unavailable"}
        assert server.admission.is_empty
        with pytest.raises(ApiError, match="started again"):
            server.open("f")
        await until(lambda: server.client.state == "ready")
        assert await read(server.open("g")) > 0
        assert server.client.num_restarts == 1

    loop.run(scenario())
