"""The simulation: its options, and the report of `quire bench serve` that its outcome gives."""

from __future__ import annotations

import platform
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import quire
from quire.base.errors import ConfigError
from quire.bench.machine import find_commit
from quire.bench.serving.arrivals import Arrivals
from quire.bench.serving.client_cost import CpuTimes
from quire.bench.serving.metrics import Goals
from quire.bench.serving.report import Report
from quire.bench.serving.runner import LoadResult
from quire.bench.serving.setup import Cost, Setup
from quire.bench.serving.utilization import Peaks
from quire.bench.serving.workload import Dataset
from quire.contracts.scheduler_config import SchedulerConfig
from quire.planner.delivery import Delivery
from quire.planner.step_time import StepTime
from quire.simulate.batching import Batching
from quire.simulate.cluster import ClusterStats, summed
from quire.simulate.events import AutoscaleOptions, Failure, HandOverOptions
from quire.simulate.loop import Loop
from quire.simulate.routing import requests_by_replica
from quire.simulate.tiers import TierOptions
from quire.simulate.workload import SimulatedLoad, make_load


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of a simulation. Raises ConfigError.

    times        step times of one replica
    windows      of the model's attention
    machine      what the times are of, for the report
    peaks        of all replicas together, for MBU and MFU
    hand_over    replicas for prefill apart from num_replicas for decode; None: every replica does both
    tiers        of the KV cache; with hand_over the host tier takes the pages in
    failures     of replicas
    delivery     what a server adds to the steps, in place of the request_s of times; None: that constant delay only
    autoscale    replicas come, go and change their roles; num_replicas are there at first
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
    peaks: Peaks | None = None
    hand_over: HandOverOptions | None = None
    tiers: TierOptions | None = None
    failures: tuple[Failure, ...] = ()
    autoscale: AutoscaleOptions | None = None
    delivery: Delivery | None = None

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ConfigError(f"--replicas must be an integer >= 1, got {self.num_replicas}")
        self._check_events()
        if self.max_waiting is not None and self.max_waiting < 0:
            raise ConfigError(f"--max-waiting must be an integer >= 0, got {self.max_waiting}")
        if self.batching.policy != "continuous" and self.batching.batch_size > self.scheduler.max_num_seqs:
            raise ConfigError(
                f"--batch-size must be at most max_num_seqs ({self.scheduler.max_num_seqs}), got {self.batching.batch_size}"
            )

    def _check_events(self) -> None:
        """Check what happens to replicas among each other."""
        num_prefill = 0 if self.hand_over is None else self.hand_over.num_prefill
        for failure in self.failures:
            if failure.replica >= self.num_replicas + num_prefill:
                raise ConfigError(
                    f"--fail takes a replica below {self.num_replicas + num_prefill}, of those at the start, got "
                    f"{failure.replica}"
                )
        if self.hand_over is not None and self.tiers is None:
            raise ConfigError("replicas for prefill need a host tier, which takes the pages in")
        if self.hand_over is not None and self.tiers is not None and self.tiers.num_disk_pages:
            raise ConfigError("--kv-disk-gb must be left out with --prefill-replicas: a disk tier is not simulated with roles")
        if self.tiers is not None and not (self.scheduler.num_host_pages and self.scheduler.enable_prefix_caching):
            raise ConfigError("KV tiers need num_host_pages and enable_prefix_caching of the scheduler")
        has_events = self.failures or self.autoscale is not None or self.tiers is not None
        if self.batching.policy != "continuous" and has_events:
            raise ConfigError(
                f"--batching must be continuous with --prefill-replicas, --kv-host-gb, --kv-disk-gb, --fail and --autoscale, "
                f"got {self.batching.policy!r}"
            )
        if self.autoscale is not None:
            limits = self.autoscale.limits
            for option, number in (("--replicas", self.num_replicas), ("--prefill-replicas", num_prefill)):
                if number and not limits.min_replicas <= number <= limits.max_replicas:
                    raise ConfigError(
                        f"{option} must be from {limits.min_replicas} to {limits.max_replicas}, see --autoscale, got {number}"
                    )


@dataclass(frozen=True, slots=True)
class Simulation:
    """The outcome: a report, and what no client sees.

    busy_shares  of each replica's time from the first request to the last token
    stats        of all replicas together
    cpu_s        that the simulation took
    """

    report: Report
    num_requests: list[int]
    busy_shares: list[float]
    stats: ClusterStats
    cpu_s: float

    @property
    def num_steps(self) -> int:
        """Steps of all replicas."""
        return self.stats.num_steps

    @property
    def num_preemptions(self) -> int:
        """Preemptions of all replicas."""
        return self.stats.num_preemptions

    @property
    def prefix_hit_share(self) -> float | None:
        """Prompt tokens that a cache had, of those that were looked up; None: there is no prefix cache."""
        return self.stats.num_hit_tokens / self.stats.num_queried_tokens if self.stats.num_queried_tokens else None

    def describe(self) -> str:
        """Return the report, and lines about the replicas."""
        shares = ", ".join(
            f"{number} requests, busy {share:.0%}" for number, share in zip(self.num_requests, self.busy_shares, strict=True)
        )
        hits = "" if self.prefix_hit_share is None else f", prefix cache hits {self.prefix_hit_share:.1%} of prompt tokens"
        stats = self.stats
        lines = [
            self.report.describe(),
            f"Simulated, not measured: {self.report.setup.machine}.",
            f"Replicas: {shares}",
            f"{self.num_steps:,} steps, {self.num_preemptions} preemptions{hits}; simulated in {self.cpu_s:.1f} CPU seconds",
        ]
        counts = {
            "pages loaded from the host": stats.num_host_pages,
            "pages read from disk": stats.num_disk_pages,
            "prompts handed over": stats.num_handed_over,
            "pages handed over": stats.num_handed_pages,
            "requests begun again": stats.num_retries,
            "streams continued": stats.num_resumes,
        }
        found = [f"{number:,} {name}" for name, number in counts.items() if number]
        lines += [", ".join(found)] if found else []
        if stats.actions:
            lines.append(f"{stats.replica_s / 3600:.3g} replica hours; the autoscaler:")
            lines += [f"  {at_s:8.0f} s  {text}" for at_s, text in stats.actions]
        return "\n".join(lines)

    def extra(self) -> dict[str, Any]:
        """Return the figures beyond the report's."""
        return {
            "requests_by_replica": self.num_requests,
            "busy_shares": self.busy_shares,
            "prefix_hit_share": self.prefix_hit_share,
            "simulation_cpu_s": self.cpu_s,
            **asdict(self.stats),
        }


def simulate(options: SimulateOptions) -> Simulation:
    """Return the outcome of a load. Deterministic for the dataset's seed. Raises ConfigError."""
    begin_s = time.process_time()
    load = make_load(options.dataset, options.arrivals)
    loop = Loop(options, load)
    loop.run()
    cpu_s = time.process_time() - begin_s
    stats = summed(loop.stats, loop.members, loop.last_s)
    report = Report(
        _setup(options, load),
        LoadResult(tuple(loop.records), 0.0, loop.last_s, False),
        Cost(CpuTimes(cpu_s), (), engine_steps=stats.num_steps),
        options.goals,
        options.percentile_metrics,
        options.percentiles,
        peaks=options.peaks,
    )
    span_s = max(loop.last_s, 1e-12)
    shares = [member.busy_s / span_s for member in loop.members]
    return Simulation(report, requests_by_replica(loop.chosen, len(loop.members)), shares, stats, cpu_s)


def _setup(options: SimulateOptions, load: SimulatedLoad) -> Setup:
    dataset = options.dataset
    source = dataset.name if dataset.path is None else f"{dataset.name} {dataset.path.name}"
    replicas = f", {options.num_replicas} replicas, {options.routing}" if options.num_replicas > 1 else ""
    if options.hand_over is not None:
        replicas += f", {options.hand_over.num_prefill} more for prefill"
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
