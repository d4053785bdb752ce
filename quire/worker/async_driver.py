"""AsyncStepDriver: a StepDriver whose steps are launched before the ones before are read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from quire.base.errors import InvariantError
from quire.contracts.step import StepPlan, StepResult
from quire.speculate.speculator import Speculator
from quire.worker.grammar_masks import StepMasks
from quire.worker.input_batch import StepInput
from quire.worker.lora import AdapterStore
from quire.worker.row_processing import masks_of, prefers_drafts
from quire.worker.step_driver import ClosedWith, EmptyStep, RunningStep, StepDriver
from quire.worker.step_executor import AsyncPageMover, RowProcessor, StepExecutor


class AsyncStepDriver(StepDriver):
    """A StepDriver over an executor with a sampler; implements contracts.step.AheadRunner.

    A step is launched as a whole, and the next one may be launched before the first one's tokens are read, if the sampler
    samples all of them and nothing is drafted. Where rows have constraints, the sampling of a step is deferred: their masks are
    filled while the model runs, once the tokens of the step before are read, and then all rows are sampled.

    is_ahead   whether the caller launches the next step early where it may
    mark_step  returns a context in which a step is launched, for profilers
    adapters, row_processor, rebalance  as in StepDriver
    page_mover  the executor, where there is a host tier
    """

    def __init__(
        self,
        executor: StepExecutor,
        speculator: Speculator | None = None,
        draft_executors: Sequence[ClosedWith] = (),
        is_ahead: bool = True,
        mark_step: Callable[[StepPlan], AbstractContextManager[object]] | None = None,
        adapters: AdapterStore | None = None,
        row_processor: RowProcessor | None = None,
        page_mover: AsyncPageMover | None = None,
        rebalance: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(executor, speculator, draft_executors, page_mover, adapters, None, rebalance, row_processor)
        self._async_mover = page_mover
        self._mark_step = mark_step
        self._is_ahead = is_ahead
        self._in_flight: list[RunningStep | EmptyStep] = []
        self._failures: dict[int, Exception] = {}  # of steps in flight whose tokens could not be sampled, by their ids

    @property
    def num_in_flight(self) -> int:
        """Steps that were launched and not collected."""
        return len(self._in_flight)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see contracts.step.Runner."""
        return self.launch(plan).collect()

    def launch(self, plan: StepPlan) -> RunningStep | EmptyStep:
        """Start a step; see contracts.step.AheadRunner."""
        limit = self._executor.max_in_flight
        if len(self._in_flight) == limit:
            raise InvariantError(f"step {plan.step_id} is launched while {limit} steps are not collected")
        with nullcontext() if self._mark_step is None else self._mark_step(plan):
            for before in self._in_flight:
                self._sample_before(before)
            with self._executor.step_scope():
                running = self._start(plan)
        if self._is_ahead and running.is_followed and not self._in_flight:
            self._speculator.note_idle(time.perf_counter() - self._ready_s)
        for before in self._in_flight:
            before.has_next = True
        self._in_flight.append(running)
        return running

    def _masks_of_start(self, step: StepInput) -> StepMasks:
        """See StepDriver: masks depend on the tokens of a step in flight, and are filled once it is collected."""
        return self._no_masks if self._in_flight else self._start_masks(step)

    def allows_next(self, running: RunningStep) -> bool:
        """See StepDriver: the masks are there, and no more is gained by drafts of what they force."""
        if not running.is_deferred:
            return True
        try:
            if running.pending is None:
                running.pending = running.masks.wait(is_running=True)
            return not running.pending and not (self._speculator.drafts_forced and prefers_drafts(running.step))
        except Exception as error:  # noqa: BLE001 - of a grammar, most likely: collect raises it, and this step alone fails
            self._failures[id(running)] = error
            return False

    def _sample_before(self, running: RunningStep | EmptyStep) -> None:
        """Sample the rows of a step before another one is started. Where that fails, `collect` of this step does: what the
        other one's plan says of rows is applied in any case."""
        try:
            with self._executor.step_scope():
                self._sample_now(running)
        except Exception as error:  # noqa: BLE001 - collect raises it
            self._failures[id(running)] = error

    def _sample_now(self, running: RunningStep | EmptyStep) -> None:
        """Sample the rows of a deferred step, of which it was waited for the masks."""
        processor = self._batch.row_processor
        if not isinstance(running, RunningStep) or not running.is_deferred or running.is_sampled or processor is None:
            return
        running.started = processor.sample_deferred(running.started, masks_of(running.step.ready))
        running.is_sampled = True

    def collect(self, running: RunningStep | EmptyStep) -> StepResult:
        """Finish a step; see contracts.step.LaunchedStep."""
        self._in_flight = [step for step in self._in_flight if step is not running]
        with self._executor.step_scope():
            try:
                if (failure := self._failures.pop(id(running), None)) is not None:
                    raise failure
                if isinstance(running, RunningStep) and running.is_deferred and running.pending is None:
                    running.pending = running.masks.wait(is_running=True)
                self._sample_now(running)
                result = self._finish(running)
            finally:  # sequences that start in the next step do not depend on this one
                for following in self._in_flight:
                    if isinstance(following, RunningStep):
                        following.masks = self._start_masks(following.step)
        if self._in_flight:
            self._speculator.restart_clock()
        if self._async_mover is None:
            return result
        # A plan without tokens is made where there is nothing else to do than to wait for pages.
        waits = isinstance(running, EmptyStep) and not self._in_flight
        with self._executor.step_scope():
            return replace(result, moved_steps=self._async_mover.take_moved(waits))

    def close(self) -> None:
        """See StepDriver."""
        self._async_mover = None
        super().close()
