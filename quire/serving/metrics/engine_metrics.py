"""EngineMetrics: the metrics of one engine of a server."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from quire.serving.engine_client.messages import EngineInfo, StepReport
from quire.serving.metrics.definitions import Definitions, GaugeSources
from quire.serving.metrics.engine_load import EngineLoad, step_work


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSource:
    """The values of an engine's client that are read when metrics are rendered.

    heartbeat_age_s  None or infinite without an engine: the sample is then omitted
    num_unfinished   unfinished requests; None if unknown
    """

    heartbeat_age_s: Callable[[], float | None] = lambda: None
    num_restarts: Callable[[], int] = lambda: 0
    num_unfinished: Callable[[], int | None] = lambda: None

    def gauge_sources(self, load: EngineLoad) -> GaugeSources:
        """Return the sources of the engine's gauges."""
        return GaugeSources(lambda: _finite(self.heartbeat_age_s()), load.flops_per_s, load.bytes_per_s, load.mfu, load.mbu)


@dataclass(frozen=True, slots=True)
class EngineOccupancy:
    """How full an engine is. num_free_blocks: those that hold a reusable prefix among them; zeros before it is loaded."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    block_size: int = 0
    max_num_seqs: int = 0


class EngineMetrics:
    """Counts the events that an engine reports.

    labels  label values that identify the engine among several; empty if it is the only one
    """

    def __init__(self, defined: Definitions, labels: tuple[str, ...], source: EngineSource, load: EngineLoad) -> None:
        self._defined = defined
        self._labels = labels
        self._source = source
        self.load = load
        self.num_waiting = 0
        self._info: EngineInfo | None = None
        self._totals: list[int] = []
        self._stage_totals: list[float] = []
        for family in defined.of_engine:
            family.labels(*labels)

    def state(self, state: str) -> None:
        """Note the state of the engine's process."""
        defined = self._defined
        defined.engine_state.only(*self._labels, state, num_fixed=len(self._labels))
        if state != "ready":
            self._totals, self._stage_totals = [], []
            self.num_waiting = 0
            for gauge in (defined.running, defined.kv_usage, defined.batch_prefill, defined.batch_decode):
                gauge.labels(*self._labels).set(0)

    def ready(self, info: EngineInfo) -> None:
        """Record the description of the loaded engine."""
        self._info = info
        self.load.peak_bytes_per_s, self.load.peak_flops_per_s = info.peak_bytes_per_s, info.peak_flops_per_s
        shape = (str(info.block_size), str(info.num_kv_blocks), str(info.enable_prefix_caching).lower(), info.kv_cache_dtype)
        self._defined.cache_config.only(*self._labels, *shape, num_fixed=len(self._labels))

    def report(self, report: StepReport) -> None:
        """Record a step."""
        defined, labels = self._defined, self._labels
        num_tokens = report.num_prefill_tokens + report.num_decode_tokens
        defined.running.labels(*labels).value = report.num_running
        self.num_waiting = report.num_waiting
        defined.batch_prefill.labels(*labels).value = report.num_prefill_tokens
        defined.batch_decode.labels(*labels).value = report.num_decode_tokens
        defined.iteration_tokens.labels(*labels).observe(num_tokens)
        defined.step_seconds.labels(*labels).observe(report.duration_s)
        self._take_totals(report)
        if self._info is None:
            return
        defined.kv_usage.labels(*labels).value = 1 - report.num_free_blocks / max(self._info.num_kv_blocks, 1)
        work = step_work(self._info, report)
        self.load.observe(work, report)
        defined.flops.labels(*labels).add(work.flops)
        defined.read_bytes.labels(*labels).add(work.read_bytes)
        defined.written_bytes.labels(*labels).add(work.written_bytes)

    def write_gauges(self, most_running: int) -> None:
        """Correct the values of the last step: after the last request is aborted, no further step would do so."""
        defined = self._defined
        is_idle = most_running == 0 or self._source.num_unfinished() == 0
        running = defined.running.labels(*self._labels)
        running.set(0 if is_idle else min(running.value, most_running))
        if is_idle:
            self.num_waiting = 0
            defined.kv_usage.labels(*self._labels).set(0)

    def occupancy(self) -> EngineOccupancy:
        """Return how full the engine is, as the gauges have it."""
        defined, info = self._defined, self._info
        num_running = int(defined.running.labels(*self._labels).value)
        if info is None:
            return EngineOccupancy(num_running, self.num_waiting)
        num_free = round((1 - defined.kv_usage.labels(*self._labels).value) * info.num_kv_blocks)
        return EngineOccupancy(num_running, self.num_waiting, num_free, info.num_kv_blocks, info.block_size, info.max_num_seqs)

    def write_restarts(self) -> None:
        """Note how often the engine was started again."""
        self._defined.restarts.labels(*self._labels).set(self._source.num_restarts())

    def _take_totals(self, report: StepReport) -> None:
        defined, accepted, labels = self._defined, report.total_accepted_per_pos, self._labels
        totals = [report.total_preemptions, report.total_prefix_queries, report.total_prefix_hits]
        totals += [report.total_evicted_blocks, *report.total_runs]
        families = [defined.preemptions, defined.prefix_queries, defined.prefix_hits, defined.evicted_blocks]
        families += [defined.looked_runs, defined.skipped_runs]
        if report.total_drafts:
            totals += [report.total_drafts, report.total_draft_tokens, sum(accepted)]
            families += [defined.drafts, defined.draft_tokens, defined.accepted_tokens]
        cells = [family.labels(*labels) for family in families]
        if report.total_drafts:
            totals += accepted
            cells += [defined.accepted_per_pos.labels(*labels, str(position)) for position in range(len(accepted))]
        self._totals += [0] * (len(totals) - len(self._totals))
        for cell, new, old in zip(cells, totals, self._totals, strict=False):
            cell.add(max(new - old, 0))
        self._totals = totals
        if report.total_stage_busy_s:
            self._take_stages(report)

    def _take_stages(self, report: StepReport) -> None:
        defined, labels, busy_s = self._defined, self._labels, report.total_stage_busy_s
        totals = [report.total_active_s, *busy_s]
        cells = [defined.stages_active.labels(*labels)]
        cells += [defined.stage_busy.labels(*labels, str(stage)) for stage in range(len(busy_s))]
        self._stage_totals += [0.0] * (len(totals) - len(self._stage_totals))
        for cell, new, old in zip(cells, totals, self._stage_totals, strict=True):
            cell.add(max(new - old, 0.0))
        self._stage_totals = totals


def _finite(seconds: float | None) -> float | None:
    return None if seconds is None or math.isinf(seconds) else seconds
