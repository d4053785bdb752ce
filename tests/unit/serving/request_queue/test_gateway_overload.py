"""Overload, in simulated time: what is served, how long it waits, and when the refused come back."""

import asyncio
import random

import pytest

from quire.serving.admission import AdmissionControl
from quire.serving.config import ServerConfig
from quire.serving.errors import ApiError
from quire.serving.metrics.server_metrics import ServerMetrics
from quire.serving.request_queue import EngineGateway
from tests.unit.serving.request_queue.virtual_engine import FakeEngine, make_job, run_virtual

MAX_NUM_SEQS, NUM_PROMPT, NUM_OUTPUT = 8, 40, 25
CAPACITY = MAX_NUM_SEQS / (NUM_OUTPUT * (0.01 + MAX_NUM_SEQS * 0.001) + MAX_NUM_SEQS * NUM_PROMPT * 0.0001)
"""Requests per second of a full engine."""


class Overload:
    def __init__(self, loop, max_queue_wait_s, seed=5):
        self.loop, self.rng = loop, random.Random(seed)
        config = ServerConfig(max_queue_wait_s=max_queue_wait_s)
        self.engine = FakeEngine(loop, MAX_NUM_SEQS)
        self.admission = AdmissionControl(config, clock=loop.time, random=self.rng.random)
        self.gateway = EngineGateway(self.engine, self.admission, ServerMetrics(config, "m", clock=loop.time), clock=loop.time)
        self.waits, self.ends, self.retries, self.num_tried = [], [], [], 0
        self.statuses = set()

    async def client(self, name, num_retries):
        for attempt in range(num_retries + 1):
            self.num_tried += 1
            began = self.loop.time()
            try:
                stream = self.gateway.open(make_job(f"{name}.{attempt}", NUM_PROMPT, NUM_OUTPUT, arrival_s=began))
            except ApiError as error:
                self.statuses.add(error.status)
                self.retries.append((began, error.retry_after_s))
                if attempt < num_retries:
                    await asyncio.sleep(error.retry_after_s)
                continue
            async with stream:
                async for delta in stream:
                    if delta.metrics is not None and not delta.finished:
                        self.waits.append(delta.metrics.first_scheduled_time - began)
            self.ends.append(self.loop.time())
            return

    async def send(self, factor, seconds, num_retries=0):
        tasks, until, number = [], self.loop.time() + seconds, 0
        while self.loop.time() < until:
            number += 1
            tasks.append(self.loop.create_task(self.client(f"{until}-{number}", num_retries)))
            await asyncio.sleep(self.rng.expovariate(factor * CAPACITY))
        return tasks


def simulate(test, max_queue_wait_s=5.0):
    async def main(loop):
        load = Overload(loop, max_queue_wait_s)
        result = await test(load)
        assert load.statuses <= {503}
        assert all(1 <= retry_s <= 120 for _, retry_s in load.retries)
        assert load.admission.is_empty
        await load.engine.stop()
        return result

    return run_virtual(main)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [40, 120])
def test_goodput_holds_and_waits_are_bounded_when_five_times_too_much_comes(seconds):
    async def test(load):
        tasks = await load.send(5, seconds)
        num_good = len(load.ends)
        assert num_good >= 0.9 * CAPACITY * seconds
        await asyncio.gather(*tasks)
        assert max(load.waits) <= 1.25 * 5.0
        ended_s = load.loop.time()
        tasks = await load.send(0.5, 30)
        assert load.loop.time() - ended_s >= 30
        await asyncio.gather(*tasks)
        assert max(load.waits[-20:]) < 0.6  # recovered: nothing waits longer than for a slot

    simulate(test)


def test_nothing_is_refused_when_the_load_is_below_capacity():
    async def test(load):
        await asyncio.gather(*await load.send(0.7, 40))
        assert not load.retries

    simulate(test)


@pytest.mark.slow
def test_load_of_retries_is_bounded_and_spread_when_clients_obey():
    async def test(load):
        tasks = [load.loop.create_task(load.client(f"c{i}", 2)) for i in range(2000)]
        await asyncio.gather(*tasks)
        assert load.num_tried <= 3 * 2000
        first = [retry_s for began, retry_s in load.retries if began == 0]
        assert len(first) > 500
        assert max(first) - min(first) >= 0.2 * min(first)
        assert len(load.ends) >= 1024

    simulate(test)
