"""The simulation: events on a virtual clock, from which the report of `quire bench serve` is made."""

from __future__ import annotations

import heapq
import math
import platform
import random
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from typing import Any, Literal

import quire
from quire.base.errors import ConfigError, RequestError
from quire.bench.machine import find_commit
from quire.bench.serving.arrivals import Arrivals
from quire.bench.serving.client_cost import CpuTimes
from quire.bench.serving.metrics import Goals
from quire.bench.serving.records import RequestRecord
from quire.bench.serving.report import Report
from quire.bench.serving.runner import LoadResult
from quire.bench.serving.setup import Cost, Setup
from quire.bench.serving.workload import Dataset
from quire.contracts.config import SchedulerConfig
from quire.contracts.request import Request
from quire.engine.scheduling.admission import check_servable
from quire.engine.scheduling.events import SequenceUpdate
from quire.planner.step_time import StepTime
from quire.simulate.batching import Batching
from quire.simulate.replica import SimulatedReplica, make_request
from quire.simulate.routing import Router, make_router, requests_by_replica
from quire.simulate.workload import SimulatedLoad, SimulatedRequest, make_load

_Event = tuple[float, int, Literal["due", "enter", "step", "begin"], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of a simulation. Raises ConfigError.

    times        step times of one replica
    windows      of the model's attention
    machine      what the times are of, for the report
    max_waiting  requests that may wait at a replica in addition to max_num_seqs that run; more are rejected with 503, as a
                 full server does. None: no limit
    """

    model: str
    machine: str
    scheduler: SchedulerConfig
    times: StepTime
    windows: tuple[int | None, ...]
    num_replicas: int = 1
    routing: str = "least-loaded"
    batching: Batching = field(default_factory=Batching)
    dataset: Dataset = field(default_factory=Dataset)
    arrivals: Arrivals = field(default_factory=Arrivals)
    goals: Goals = field(default_factory=lambda: Goals({}))
    percentile_metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    percentiles: tuple[float, ...] = (50.0, 90.0, 95.0, 99.0)
    max_waiting: int | None = None

    def __post_init__(self) -> None:
        if self.max_waiting is not None and self.max_waiting < 0:
            raise ConfigError(f"--max-waiting must be an integer >= 0, got {self.max_waiting}")
        if self.batching.policy != "continuous" and self.batching.batch_size > self.scheduler.max_num_seqs:
            raise ConfigError(
                f"--batch-size must be at most max_num_seqs ({self.scheduler.max_num_seqs}), got {self.batching.batch_size}"
            )


@dataclass(frozen=True, slots=True)
class Simulation:
    """The outcome: a report, and what no client sees.

    busy_shares  of each replica's time from the first request to the last token
    cpu_s        that the simulation took
    """

    report: Report
    num_steps: int
    num_requests: list[int]
    busy_shares: list[float]
    num_preemptions: int
    prefix_hit_share: float | None
    cpu_s: float

    def describe(self) -> str:
        """Return the report, and a line about the replicas."""
        shares = ", ".join(
            f"{number} requests, busy {share:.0%}" for number, share in zip(self.num_requests, self.busy_shares, strict=True)
        )
        hits = "" if self.prefix_hit_share is None else f", prefix cache hits {self.prefix_hit_share:.1%} of prompt tokens"
        return (
            f"{self.report.describe()}\nSimulated, not measured: {self.report.setup.machine}.\nReplicas: {shares}\n"
            f"{self.num_steps:,} steps, {self.num_preemptions} preemptions{hits}; simulated in {self.cpu_s:.1f} CPU seconds"
        )

    def extra(self) -> dict[str, Any]:
        """Return the figures beyond the report's."""
        return {
            "num_steps": self.num_steps,
            "requests_by_replica": self.num_requests,
            "busy_shares": self.busy_shares,
            "num_preemptions": self.num_preemptions,
            "prefix_hit_share": self.prefix_hit_share,
            "simulation_cpu_s": self.cpu_s,
        }


def simulate(options: SimulateOptions) -> Simulation:
    """Return the outcome of a load. Deterministic for the dataset's seed. Raises ConfigError."""
    begin_s = time.process_time()
    load = make_load(options.dataset, options.arrivals)
    loop = _Loop(options, load)
    loop.run()
    cpu_s = time.process_time() - begin_s
    result = LoadResult(tuple(loop.records), 0.0, loop.last_s, False)
    report = Report(
        _setup(options, load),
        result,
        Cost(CpuTimes(cpu_s), (), engine_steps=sum(replica.num_steps for replica in loop.replicas)),
        options.goals,
        options.percentile_metrics,
        options.percentiles,
    )
    schedulers = [replica.scheduler for replica in loop.replicas]
    queried = sum(scheduler.prefix_cache_queries for scheduler in schedulers)
    hits = sum(scheduler.prefix_cache_hits for scheduler in schedulers)
    span_s = max(loop.last_s, 1e-12)
    return Simulation(
        report,
        sum(replica.num_steps for replica in loop.replicas),
        requests_by_replica(loop.chosen, options.num_replicas),
        [replica.busy_s / span_s for replica in loop.replicas],
        sum(scheduler.num_preemptions for scheduler in schedulers),
        hits / queried if queried else None,
        cpu_s,
    )


class _Loop:
    """The events of one simulation in order of time; those of one time in order of creation."""

    def __init__(self, options: SimulateOptions, load: SimulatedLoad) -> None:
        self.records = [
            RequestRecord(one.index, one.due_s, one.num_input_tokens, one.num_output_tokens) for one in load.requests
        ]
        self.replicas = [
            SimulatedReplica(
                options.scheduler, options.times, options.windows, options.batching, random.Random(options.dataset.seed + index)
            )
            for index in range(options.num_replicas)
        ]
        self.chosen: list[int] = []
        self.last_s = 0.0
        self._router: Router = make_router(options.routing, options.num_replicas, options.scheduler)
        self._options = options
        self._load = load
        self._requests: dict[int, Request] = {}
        self._owners: dict[int, int] = {}
        self._held: deque[SimulatedRequest] = deque()  # by max_concurrency, in the client
        self._num_in_flight = 0
        self._num_left = len(load.requests)  # that have not reached a replica
        self._is_closed = False
        self._numbers = count()
        self._events: list[_Event] = []

    def run(self) -> None:
        """Handle all events."""
        for request in self._load.requests:
            self._push(request.due_s, "due", request.index)
        handlers = {"due": self._on_due, "enter": self._on_enter, "step": self._on_step, "begin": self._begin}
        now = 0.0
        while self._events or self._start_incomplete(now):
            now, _, kind, index = heapq.heappop(self._events)
            handlers[kind](index, now)

    def _push(self, at_s: float, kind: Literal["due", "enter", "step", "begin"], index: int) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), kind, index))

    def _on_due(self, index: int, now: float) -> None:
        self._held.append(self._load.requests[index])
        self._send(now)

    def _send(self, now: float) -> None:
        """Send what the client may send."""
        limit = self._options.arrivals.max_concurrency
        while self._held and (limit is None or self._num_in_flight < limit):
            simulated = self._held.popleft()
            record = self.records[simulated.index]
            record.outcome = "running"
            record.sent_s = now
            self._num_in_flight += 1
            self._push(now + self._options.times.request_s, "enter", simulated.index)

    def _on_enter(self, index: int, now: float) -> None:
        """Admit a request, and route it."""
        self._num_left -= 1
        simulated, record = self._load.requests[index], self.records[index]
        request = make_request(simulated)
        try:
            check_servable(request, self._options.scheduler)
        except RequestError as error:
            record.status = 400
            record.fail("http_400", str(error), now)
            self._leave(now)
            return
        chosen = self._router.choose(request)
        replica = self.replicas[chosen]
        most = self._options.max_waiting
        if most is not None and replica.num_unfinished >= self._options.scheduler.max_num_seqs + most:
            self._router.end(request, chosen)
            record.outcome, record.status, record.end_s = "rejected", 503, now
            self._leave(now)
            return
        self.chosen.append(chosen)
        self._requests[index] = request
        self._owners[index] = chosen
        replica.requests[request.request_id] = request
        replica.queue.add(simulated, now)
        self._close_queues(now)
        if not replica.is_running:
            self._push(now, "begin", chosen)  # after all that come at this moment

    def _leave(self, now: float) -> None:
        """Take note that a request has ended."""
        self.last_s = max(self.last_s, now)
        self._num_in_flight -= 1
        self._send(now)
        self._close_queues(now)

    def _close_queues(self, now: float) -> None:
        """Let incomplete batches start once no further request comes."""
        if self._num_left > 0 or self._is_closed:
            return
        self._is_closed = True
        for index, replica in enumerate(self.replicas):
            replica.queue.is_closed = True
            self._push(now, "begin", index)

    def _start_incomplete(self, now: float) -> bool:
        """Let incomplete batches start where nothing else happens: the client waits for them. Return whether there were any."""
        waiting = [index for index, replica in enumerate(self.replicas) if len(replica.queue)]
        for index in waiting:
            self.replicas[index].queue.is_flushed = True
            self._push(now, "begin", index)
        return bool(waiting)

    def _begin(self, index: int, now: float) -> None:
        """Start a step of a replica, if none is under way and there is something to compute."""
        replica = self.replicas[index]
        if replica.is_running:
            return
        end_s = replica.begin(now, self._horizon_s())
        if end_s is not None:
            self._push(end_s, "step", index)
            return
        deadline_s = replica.queue.deadline_s
        if deadline_s is not None and deadline_s > now:
            self._push(deadline_s, "begin", index)

    def _horizon_s(self) -> float:
        """Return until when nothing comes to any replica: the next arrival, or any event where ends let others in."""
        if self._options.arrivals.max_concurrency is not None:
            return self._events[0][0] if self._events else math.inf
        next_one = len(self._load.requests) - self._num_left
        if next_one == len(self._load.requests):
            return math.inf
        return self._load.requests[next_one].due_s + self._options.times.request_s

    def _on_step(self, index: int, now: float) -> None:
        self.last_s = max(self.last_s, now)
        updates, ends_s = self.replicas[index].end(now)
        for update in updates:
            self._take(update, index, ends_s)
        self._begin(index, now)

    def _take(self, update: SequenceUpdate, replica: int, ends_s: list[float]) -> None:
        now = ends_s[-1]
        index = int(update.request_id)
        record = self.records[index]
        if update.new_token_ids:
            if record.first_choice_s is None:
                record.first_choice_s = now
                record.usage_prompt_tokens = record.num_prompt_tokens
            record.last_choice_s = now
            record.content_s.extend(ends_s)
            record.num_events += len(ends_s)
            self._router.note_output(self._requests[index], len(update.new_token_ids))
        if update.finish_reason is None:
            return
        record.finish_reason = update.finish_reason
        record.usage_output_tokens = len(record.content_s)
        record.has_done = True
        record.end_s = now
        if update.finish_reason == "length":
            record.outcome = "ok"
        else:
            record.fail(f"finish_{update.finish_reason}", update.error or "", now)
        if update.stats is not None:
            record.usage_cached_tokens = update.stats.num_cached_tokens
        self._router.end(self._requests.pop(index), replica)
        del self._owners[index]
        self._leave(now)


def _setup(options: SimulateOptions, load: SimulatedLoad) -> Setup:
    dataset = options.dataset
    source = dataset.name if dataset.path is None else f"{dataset.name} {dataset.path.name}"
    replicas = f", {options.num_replicas} replicas, {options.routing}" if options.num_replicas > 1 else ""
    return Setup(
        backend="simulated",
        base_url="",
        endpoint="",
        model=options.model,
        tokenizer=None,
        dataset=source,
        arrival=options.arrivals.describe(load.has_times),
        num_prompts=len(load.requests),
        request_rate=options.arrivals.request_rate,
        burstiness=options.arrivals.burstiness,
        max_concurrency=options.arrivals.max_concurrency,
        ignore_eos=True,
        seed=dataset.seed,
        event_loop="none",
        json_parser="none",
        quire_version=quire.__version__,
        platform=f"{platform.platform()}, Python {platform.python_version()}",
        machine=f"{options.machine}, {options.batching.describe()}{replicas}",
        commit=find_commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
