"""A feed over a fake engine, whose clock and timer move only by hand, and how its events are read."""

import asyncio
import json
from types import SimpleNamespace

from quire.serving.engine_client.messages import KvReport, StepOutputs, StepPart, StepReport
from quire.serving.metrics.request_record import RequestRecord
from quire.serving.page.feed import EngineFeed
from quire.serving.page.view import EngineView
from quire.serving.request_queue.engine_gateway import QueueSnapshot
from tests.unit.serving.fakes import engine_info

NEVER_S = 1e6  # the tests tick by hand


class Engine:
    def __init__(self):
        self.on_step, self.on_kv, self.on_state = [], [], []
        self.state = "ready"
        self.info = engine_info()
        self.watched = []
        self.ranks = []
        self.tiers = []
        self.experts = []

    def watch(self, hz):
        self.watched.append(hz)

    def become(self, state):
        self.state = state
        for listener in self.on_state:
            listener(state)


class Setting:
    """A feed over fakes; `clock_s` moves only by hand."""

    def __init__(self):
        self.clock_s = 100.0
        self.phase = "serving"
        self.num_snapshots = 0
        self.engine = Engine()
        self.metrics = SimpleNamespace(records={}, on_end=[])
        self.view = EngineView(self.engine, self, self.metrics, lambda: self.phase, clock=lambda: self.clock_s)
        self.feed = EngineFeed(self.engine, self.view, tick_s=NEVER_S)

    def snapshot(self):
        self.num_snapshots += 1
        return QueueSnapshot(
            classes=[],
            num_in_engine=len(self.metrics.records),
            num_sequences_in_engine=0,
            capacity=20,
            prefill_tokens_per_s=None,
            decode_tokens_per_s=None,
            is_draining=False,
        )

    def add_request(self, request_id, num_prompt=5):
        request = SimpleNamespace(request_id=request_id, prompt_token_ids=(1,) * num_prompt, prompt="a secret")
        job = SimpleNamespace(request=request, priority="default", owner=SimpleNamespace(name="ann"))
        record = RequestRecord(job, self.clock_s, self.clock_s)
        self.metrics.records[request_id] = record
        return record

    def end(self, record, reason="stop"):
        record.ended_s = self.clock_s
        record.finish_reasons.append(reason)
        del self.metrics.records[record.job.request.request_id]
        for listener in self.metrics.on_end:
            listener(record)

    def step(self, step_id, *parts, preemptions=0):
        self.clock_s += 0.01
        for listener in self.engine.on_step:
            listener(StepOutputs([], report(step_id, self.clock_s, parts, preemptions)))

    def kv(self, blocks, cached=(), num_blocks=256):
        for listener in self.engine.on_kv:
            listener(KvReport(self.clock_s, num_blocks, blocks, list(cached)))


def report(step_id, now_s, parts=(), preemptions=0):
    prefill = sum(tokens for _, tokens, is_prefill in parts if is_prefill)
    return StepReport(
        step_id=step_id,
        started_s=now_s,
        duration_s=0.004,
        num_prefill_tokens=prefill,
        num_decode_tokens=sum(tokens for _, tokens, _ in parts) - prefill,
        attended=[(0, 0)],
        num_running=len(parts),
        num_waiting=0,
        num_free_blocks=250,
        num_cached_blocks=3,
        total_preemptions=preemptions,
        total_prefix_queries=0,
        total_prefix_hits=0,
        parts=[StepPart(name, 0, tokens, is_prefill) for name, tokens, is_prefill in parts],
    )


def parse(event):
    lines = dict(line.split(": ", 1) for line in event.decode().strip().split("\n"))
    return lines["event"], int(lines["id"]), json.loads(lines["data"])


async def take(frames):
    """Return the next event, which must be there already."""
    return parse(await asyncio.wait_for(anext(frames), 60))


def run(scenario):
    asyncio.run(scenario(Setting()))
