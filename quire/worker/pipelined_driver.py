"""PipelinedStepDriver: a StepDriver with a step on its way for each pipeline stage, each of other sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

from quire.base.errors import InvariantError
from quire.contracts.step import LaunchedStep, StageTimes, StepPlan, StepResult
from quire.speculate.speculator import Speculator, StepDrafts
from quire.worker.lora import AdapterStore
from quire.worker.step_driver import ClosedWith, EmptyStep, RunningStep, StepDriver
from quire.worker.step_executor import AsyncPageMover, PageMover, RowProcessor, StepExecutor


class StageExecutor(StepExecutor, Protocol):
    """An executor whose steps are computed by several stages."""

    @property
    def stage_times(self) -> StageTimes | None:
        """How long each stage has computed; None: nobody measures."""
        ...

    @property
    def worker_pids(self) -> dict[int, int]:
        """The processes of the stages."""
        ...


class PipelinedStepDriver(StepDriver):
    """Implements contracts.step.PipelinedRunner.

    Steps are collected in the order in which they were launched. No sequence is in two of them, so that rows, masks and drafts
    of one step do not depend on those of another.

    mark_step  returns a context in which a step is launched, for profilers
    others     as in StepDriver
    """

    def __init__(
        self,
        executor: StageExecutor,
        speculator: Speculator | None = None,
        draft_executors: Sequence[ClosedWith] = (),
        page_mover: PageMover | None = None,
        adapters: AdapterStore | None = None,
        mark_step: Callable[[StepPlan], AbstractContextManager[object]] | None = None,
        row_processor: RowProcessor | None = None,
        rebalance: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(executor, speculator, draft_executors, page_mover, adapters, None, rebalance, row_processor)
        self.num_stages = executor.max_in_flight
        self._pipeline, self._mark_step = executor, mark_step
        self.in_flight: dict[int, StepDrafts | None] = {}  # by step id

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see contracts.step.Runner."""
        return self.launch(plan).collect()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step; see contracts.step.PipelinedRunner."""
        if len(self.in_flight) == self.num_stages:
            raise InvariantError(f"step {plan.step_id} is launched while {self.num_stages} steps are not collected")
        with nullcontext() if self._mark_step is None else self._mark_step(plan), self._executor.step_scope():
            running = self._start(plan)
        self.in_flight[plan.step_id] = self._speculator.suspend() if running.is_followed else None
        return running

    def collect(self, running: RunningStep | EmptyStep) -> StepResult:
        """Finish a step; see contracts.step.LaunchedStep."""
        drafts = self.in_flight.pop(running.plan.step_id)
        if drafts is not None:
            self._speculator.resume(drafts)
        result = super().collect(running)
        if not isinstance(self._page_mover, AsyncPageMover):
            return result
        # A plan without tokens is made where there is nothing else to do than to wait for pages.
        waits = isinstance(running, EmptyStep) and not self.in_flight
        with self._executor.step_scope():
            return replace(result, moved_steps=self._page_mover.take_moved(waits))

    @property
    def stage_times(self) -> StageTimes | None:
        """See EngineRunner."""
        return self._pipeline.stage_times

    @property
    def worker_pids(self) -> dict[int, int]:
        """See StageExecutor."""
        return self._pipeline.worker_pids
