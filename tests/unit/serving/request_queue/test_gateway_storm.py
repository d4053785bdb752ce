"""Random opens, reads, cancels, deadlines, aborts and deaths: every request ends once, and nothing is left."""

import asyncio
import random
from collections import Counter

import pytest

from quire.serving.config import ApiKey, ServerConfig
from quire.serving.errors import ApiError
from tests.unit.serving.request_queue.virtual_bench import with_bench
from tests.unit.serving.request_queue.virtual_engine import make_job


class Storm:
    """Random opens, reads, cancels, deadlines, aborts and deaths; every stream's fate is written down."""

    def __init__(self, bench, seed):
        self.bench, self.rng = bench, random.Random(seed)
        self.fates = Counter()
        self.reading = []
        self.num_choices = 0

    async def client(self, name):
        rng, bench = self.rng, self.bench
        await asyncio.sleep(rng.expovariate(0.05))
        length = rng.randint(1, 40)
        deadline_s = bench.loop.time() + rng.expovariate(0.5) if rng.random() < 0.2 else None
        job = make_job(
            name, rng.randint(1, 200), length, rng.choice("abc"), rng.choice(["interactive", "default", "batch"]),
            rng.choice([1, 1, 1, 3, 12]), deadline_s=deadline_s,
        )  # fmt: skip
        try:
            stream = bench.gateway.open(job)
        except ApiError as error:
            self.fates["refused"] += error.status in (408, 429, 503)
            return
        self.num_choices += job.request.params.n
        task = asyncio.current_task()
        self.reading.append(task)
        try:
            self.fates[await self.use(stream, length * job.request.params.n)] += 1
        except ApiError as error:
            self.fates[error.code] += 1
        except asyncio.CancelledError:
            self.fates["cancelled"] += 1
        finally:
            self.reading.remove(task)

    async def use(self, stream, num_expected):
        """Read a stream, perhaps slowly, perhaps not to its end; returns how it ended."""
        leave_after = self.rng.choice([None, None, None, 1, 5])
        slow_s = self.rng.choice([0, 0, 0.3])
        tokens, last = 0, None
        async with stream:
            async for delta in stream:
                assert last is None or not last.finished
                last = delta
                tokens += sum(len(choice.token_ids) for choice in delta.choices)
                if leave_after is not None and tokens >= leave_after:
                    return "left"
                if self.rng.random() < 0.01:
                    stream.abort("cancelled")
                if slow_s:
                    await asyncio.sleep(slow_s)
            reason = last.choices[0].finish_reason
            assert last.finished
            assert tokens == num_expected or reason == "abort"
            return reason

    async def run(self, num_clients):
        tasks = [self.bench.loop.create_task(self.client(f"r{i}")) for i in range(num_clients)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(self.rng.expovariate(4))
            self.bench.admission.check_invariants()
            dice = self.rng.random()
            if dice < 0.3:
                self.rng.choice(self.reading or tasks).cancel()
            elif dice < 0.33 and self.bench.engine.state == "ready":
                self.bench.engine.set_state("restarting")
                self.bench.loop.call_later(self.rng.uniform(0, 2), self.bench.engine.set_state, "ready")
        for task in tasks:
            if not task.cancelled():
                task.result()
        self.fates["never"] = sum(task.cancelled() for task in tasks)
        await asyncio.sleep(3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_once_when_anything_happens(seed):
    config = ServerConfig(max_queued_requests=60, max_queued_tokens=4000, api_keys=(ApiKey("a", b"", max_concurrent=20),))

    async def test(bench):
        storm = Storm(bench, seed)
        await storm.run(600)
        assert sum(storm.fates.values()) == 600
        assert {"refused", "length", "left", "cancelled", "abort"} <= storm.fates.keys(), storm.fates
        assert sum(cell.value for cell in bench.metrics.defined.success.cells.values()) == storm.num_choices
        assert max(bench.engine.most_sequences, bench.engine.most_background) <= max(bench.gateway.capacity, 12)

    with_bench(test, config=config, max_num_seqs=8)
