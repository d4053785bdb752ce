"""EngineView: the state of the engine for viewers; it records nothing while there are no viewers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.contracts.expert_stats import ExpertStats
from quire.contracts.rank_stats import RankStats
from quire.contracts.tier_stats import TierStats
from quire.serving.engine_client.messages import MAX_STEP_PARTS, EngineInfo, KvReport, StepOutputs, StepReport
from quire.serving.engine_client.supervisor import EngineState
from quire.serving.metrics.request_record import RequestRecord
from quire.serving.page.request_table import RequestTable
from quire.serving.page.wire import CACHED, MAX_BUSIEST, EngineShape, ExpertRow, Frame, KvCells, RankRow, StepRow, TierRow
from quire.serving.public_error import show_error
from quire.serving.request_queue.engine_gateway import QueueSnapshot

RING_STEPS = 4096
MAX_PARTS = MAX_STEP_PARTS


class WatchedEngine(Protocol):
    """The interface of the engine's client that the view needs."""

    on_step: list[Callable[[StepOutputs], None]]
    on_kv: list[Callable[[KvReport], None]]
    on_state: list[Callable[[EngineState], None]]

    @property
    def state(self) -> EngineState: ...

    @property
    def info(self) -> EngineInfo | None: ...

    ranks: list[RankStats]
    tiers: list[TierStats]
    experts: list[ExpertStats]

    def watch(self, hz: float) -> None: ...


class WatchedQueue(Protocol):
    """The interface of the gateway that the view needs."""

    def snapshot(self) -> QueueSnapshot: ...


class WatchedRequests(Protocol):
    """The interface of the metrics that the view needs."""

    records: dict[str, RequestRecord]
    on_end: list[Callable[[RequestRecord], None]]


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a viewer is up to date: later versions and steps are new to it."""

    version: int = 0
    step_id: int = -1


class EngineView:
    """Listens between start and stop. Reports are stored unprocessed until a frame is requested.

    phase     of the server
    replicas  the states of all engines; empty if there is only one
    """

    def __init__(
        self,
        engine: WatchedEngine,
        queue: WatchedQueue,
        requests: WatchedRequests,
        phase: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        replicas: Callable[[], list[str]] = list,
    ) -> None:
        self._replicas = replicas
        self._engine = engine
        self._queue = queue
        self._requests = requests
        self._phase = phase
        self._clock = clock
        self._origin_s = clock()
        self._table = RequestTable(self._origin_s)
        self._steps: deque[StepRow] = deque(maxlen=RING_STEPS)
        self._totals: tuple[int, int, int] | None = None
        self._kv: KvReport | None = None
        self._version = 0
        # Versions of the last change.
        self._kv_version = self._queue_version = self._state_version = self._ranks_version = self._tiers_version = 0
        self._experts_version = 0
        self._last_experts: list[ExpertStats] = []
        self._last_ranks: list[RankStats] = []
        self._last_tiers: list[TierStats] = []
        self._last_queue: QueueSnapshot | None = None
        self._last_state: tuple[object, ...] = ()
        self._last_kv: tuple[dict[str, list[int]], list[int]] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether the server drains or has failed, and no request is unfinished."""
        return self._phase() in ("draining", "failed") and not self._requests.records

    def start(self) -> None:
        """Start listening. Changes of requests before that are not known; earlier steps are kept."""
        self._table.forget(self._requests.records)
        self._totals = None
        self._engine.on_step.append(self._on_step)
        self._engine.on_kv.append(self._on_kv)
        self._engine.on_state.append(self._on_state)
        self._requests.on_end.append(self._on_end)
        self.update()

    def stop(self) -> None:
        """Stop listening."""
        self._engine.on_step.remove(self._on_step)
        self._engine.on_kv.remove(self._on_kv)
        self._engine.on_state.remove(self._on_state)
        self._requests.on_end.remove(self._on_end)

    def update(self) -> None:
        """Read the present state of requests and queue."""
        self._version += 1
        for record in self._requests.records.values():
            self._table.update(record, self._version)
        self._table.forget(self._requests.records)
        queue = self._queue.snapshot()
        if queue != self._last_queue:
            self._last_queue, self._queue_version = queue, self._version
        if self._engine.ranks != self._last_ranks:
            self._last_ranks, self._ranks_version = self._engine.ranks, self._version
        if self._engine.tiers != self._last_tiers:
            self._last_tiers, self._tiers_version = self._engine.tiers, self._version
        if self._engine.experts != self._last_experts:
            self._last_experts, self._experts_version = self._engine.experts, self._version
        state = (self._engine.state, self._phase(), self._engine.info, self._replicas())
        if state != self._last_state:
            self._last_state, self._state_version = state, self._version

    def mark(self) -> Mark:
        """Return the mark of a frame that is made now."""
        return Mark(self._version, self._steps[-1].step_id if self._steps else -1)

    def frame(self, since: Mark, is_admin: bool) -> Frame | None:
        """Return the changes after a mark, None if there are none."""
        version = since.version
        steps = self._steps_after(since.step_id)
        rows = self._table.rows(version, with_ids=is_admin)
        has_kv = self._kv is not None and self._kv_version > version
        of_engine = (self._state_version, self._ranks_version, self._tiers_version, self._experts_version)
        changed = max(self._queue_version, *of_engine) > version
        if not (steps or rows or has_kv or changed):
            return None
        return Frame(
            now_ms=self._ms(self._clock()),
            engine=self._engine.state,
            phase=self._phase(),
            shape=self._shape() if self._state_version > version else None,
            queue=self._last_queue if self._queue_version > version else None,
            kv=kv_cells(self._kv, self._table.number_of) if has_kv and self._kv is not None else None,
            requests=rows,
            steps=steps,
            replicas=self._replicas() if self._state_version > version else [],
            ranks=self._rank_rows() if self._ranks_version > version else None,
            tiers=[_tier_row(stats) for stats in self._last_tiers] if self._tiers_version > version else None,
            experts=[_expert_row(stats) for stats in self._last_experts] if self._experts_version > version else None,
        )

    def _rank_rows(self) -> list[RankRow]:
        return [
            RankRow(
                each.rank,
                each.pid,
                each.state,
                each.memory_bytes,
                round(each.share, 4),
                round(each.wait_s * 1000, 1),
                each.part,
            )
            for each in self._engine.ranks
        ]

    def snapshot(self, after_step: int, is_admin: bool) -> Frame:
        """Return the whole state; of the steps only those after a known one."""
        newest = self.mark().step_id
        since = Mark(0, after_step if after_step <= newest else -1)  # a newer step is of an engine that has ended
        frame = self.frame(since, is_admin)
        return Frame(self._ms(self._clock()), self._engine.state, self._phase()) if frame is None else frame

    def _steps_after(self, step_id: int) -> list[StepRow]:
        found: list[StepRow] = []
        for row in reversed(self._steps):
            if row.step_id <= step_id:
                break
            found.append(row)
        return found[::-1]

    def _shape(self) -> EngineShape | None:
        info = self._engine.info
        if info is None:
            return None
        name = info.model.rstrip("/").rpartition("/")[2]
        limits = (info.max_num_seqs, info.max_num_batched_tokens, info.block_size, info.num_kv_blocks)
        return EngineShape(name, *limits, info.role)

    def _on_step(self, outputs: StepOutputs) -> None:
        if outputs.report is not None:
            self._steps.append(self._row(outputs.report))

    def _row(self, report: StepReport) -> StepRow:
        totals = (report.total_preemptions, report.total_prefix_queries, report.total_prefix_hits)
        before, self._totals = self._totals or totals, totals
        preemptions, queries, hits = (max(new - old, 0) for new, old in zip(totals, before, strict=True))
        parts = [(part, self._table.note_step(part.request_id, report.started_s)) for part in report.parts]
        return StepRow(
            step_id=report.step_id,
            started_ms=self._ms(report.started_s),
            duration_ms=round(report.duration_s * 1000, 3),
            prefill_tokens=report.num_prefill_tokens,
            decode_tokens=report.num_decode_tokens,
            running=report.num_running,
            waiting=report.num_waiting,
            free_blocks=report.num_free_blocks,
            cached_blocks=report.num_cached_blocks,
            preemptions=preemptions,
            prefix_queries=queries,
            prefix_hits=hits,
            parts=[(number, part.num_tokens, int(part.is_prefill)) for part, number in parts[:MAX_PARTS]],
        )

    def _on_kv(self, report: KvReport) -> None:
        state = (report.blocks, report.cached)
        if state != self._last_kv:
            self._kv, self._last_kv = report, state
            self._kv_version = self._version + 1  # it counts as changed from the next update on

    def _on_state(self, state: EngineState) -> None:
        if state != "ready":  # the next engine numbers its steps from 0
            self._steps.clear()
            self._totals = self._kv = self._last_kv = None

    def _on_end(self, record: RequestRecord) -> None:
        self._table.update(record, self._version + 1)

    def _ms(self, time_s: float) -> float:
        return round((time_s - self._origin_s) * 1000, 1)


def _expert_row(stats: ExpertStats) -> ExpertRow:
    order = sorted(range(len(stats.tokens)), key=lambda expert: -stats.tokens[expert])
    return ExpertRow(
        layer=stats.layer,
        num_experts=len(stats.tokens),
        tokens=sum(stats.tokens),
        busiest=[(expert, stats.tokens[expert]) for expert in order[:MAX_BUSIEST]],
        rank_tokens=[round(count) for count in stats.rank_tokens],
        imbalance=round(stats.imbalance, 4),
        imbalance_before=round(stats.imbalance_before, 4),
        imbalance_after=round(stats.imbalance_after, 4),
        num_moved=stats.num_moved,
        num_failed_moves=stats.num_failed_moves,
    )


def _tier_row(stats: TierStats) -> TierRow:
    counts = (stats.num_hits, stats.num_saved, stats.num_loaded, stats.num_dropped)
    times = (round(stats.save_s * 1000, 1), round(stats.load_s * 1000, 1))
    sizes = (stats.num_pages, stats.num_bytes, stats.max_bytes)
    problems = {address: show_error(problem) for address, problem in stats.problems.items()}
    return TierRow(stats.tier, *sizes, *counts, *times, dict(stats.outcomes), problems)


MAX_CELLS = 8192


def kv_cells(report: KvReport, number_of: Callable[[str], int]) -> KvCells:
    """Return the cells of a report. A cell of several blocks shows the one that most hold; number_of numbers the requests."""
    per_cell = -(-report.num_blocks // MAX_CELLS)
    holders: dict[int, tuple[int, int]] = {}  # block -> first holder, number of sequences
    for request_id, block_ids in report.blocks.items():
        number = number_of(request_id)
        for block_id in block_ids:
            first, count = holders.get(block_id, (number, 0))
            holders[block_id] = (first, count + 1)
    num_used = len(holders)
    by_request = [
        (number_of(request_id), len(block_ids), sum([holders[block_id][1] > 1 for block_id in block_ids]))
        for request_id, block_ids in ((request_id, set(block_ids)) for request_id, block_ids in report.blocks.items())
    ]
    num_shared = sum([count > 1 for _, count in holders.values()])
    for block_id in report.cached:
        holders.setdefault(block_id, (CACHED, 0))
    cells: dict[int, tuple[int, int]] = {}
    for block_id in sorted(holders):
        cell, held = block_id // per_cell, holders[block_id]
        if cell not in cells or held[1] > cells[cell][1]:
            cells[cell] = held
    return KvCells(report.num_blocks, per_cell, num_used, num_shared, len(report.cached), _runs(cells), by_request)


def _runs(cells: dict[int, tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    runs: list[tuple[int, int, int, int]] = []
    for cell, (number, count) in cells.items():
        if runs:
            first, length, *held = runs[-1]
            if first + length == cell and held == [number, count]:
                runs[-1] = (first, length + 1, number, count)
                continue
        runs.append((cell, 1, number, count))
    return runs
