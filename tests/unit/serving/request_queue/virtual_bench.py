"""A gateway over the engine that computes nothing, and what has to hold when a test is over."""

import asyncio
import random
from collections import Counter

from quire.serving.admission import AdmissionControl
from quire.serving.config import ServerConfig
from quire.serving.metrics.server_metrics import ServerMetrics
from quire.serving.request_queue import EngineGateway
from tests.unit.serving.request_queue.virtual_engine import FakeEngine, run_virtual


class Bench:
    def __init__(self, loop, config=None, **engine):
        self.loop = loop
        self.config = config or ServerConfig()
        self.engine = FakeEngine(loop, **engine)
        self.admission = AdmissionControl(self.config, clock=loop.time, random=random.Random(1).random)
        self.metrics = ServerMetrics(self.config, "demo", clock=loop.time)
        self.gateway = EngineGateway(self.engine, self.admission, self.metrics, clock=loop.time)

    async def check_empty(self):
        await asyncio.sleep(0.5)  # aborts that are under way reach the engine
        self.admission.check_invariants()
        assert self.admission.is_empty
        assert not self.metrics.records
        assert not self.engine.errors, self.engine.errors
        assert max(Counter(self.engine.aborts).values(), default=0) <= 1
        assert await self.gateway.drained(0.1)
        await self.engine.stop()


def with_bench(test, **options):
    async def main(loop):
        bench = Bench(loop, **options)
        result = await test(bench)
        await bench.check_empty()
        return result

    return run_virtual(main)


async def read(stream):
    tokens, reasons = 0, []
    async with stream:
        async for delta in stream:
            tokens += sum(len(choice.token_ids) for choice in delta.choices)
            reasons += [choice.finish_reason for choice in delta.choices if choice.finish_reason]
    return tokens, reasons
