"""StepLoop: sends plans to the runner and commits results, synchronously or with the next step launched ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from quire.base.errors import DeviceLostError, InvariantError
from quire.base.logging import get_logger
from quire.contracts.step import AheadRunner, LaunchedStep, PipelinedRunner, Runner, StepPlan, StepResult
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.scheduling.step_record import Attended, StepRecord, StepShare, describe_plan

logger = get_logger(__name__)


@dataclass(slots=True)
class _SynchronousStep:
    """A step of a synchronous runner: it is executed when it is collected."""

    runner: Runner
    plan: StepPlan
    allows_next: bool = False

    def collect(self) -> StepResult:
        return self.runner.execute(self.plan)


@dataclass(slots=True)
class _Step:
    """A step in flight; launched: None if it could not be launched; failure has the reason."""

    plan: StepPlan
    started_s: float
    shares: list[StepShare]
    attended: list[Attended]
    launched: LaunchedStep | None = None
    failure: str = ""


class StepLoop:
    """Runs the steps of one scheduler on one runner.

    With an AheadRunner and is_ahead, the next step is planned and launched before the running one is collected, if the
    runner and the scheduler allow it. Otherwise the running one is collected first. With a PipelinedRunner and
    is_ahead, as many steps are in flight as it has stages, if there are sequences for them.

    commit   called with plan and result, in the order of the plans; if a whole step failed, with a result of errors
    windows  that step records distinguish, see describe_plan
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        commit: Callable[[StepPlan, StepResult], None],
        is_ahead: bool = True,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self._scheduler, self._commit, self._may_be_ahead = scheduler, commit, is_ahead
        self.use_runner(runner)
        self._steps: list[_Step] = []  # in flight, oldest first
        self._windows = windows
        self._last_end_s = 0.0
        self.is_recording = False  # whether last_step is recorded
        self.last_step: StepRecord | None = None

    def use_runner(self, runner: Runner | None) -> None:
        """Run the next steps on another runner of the same kind; None: there are none until the next call. No step may be in
        flight."""
        self._runner = runner
        # With pipeline stages no step continues the sequences of one in flight.
        self._pipelined = runner if self._may_be_ahead and isinstance(runner, PipelinedRunner) else None
        self._ahead = runner if self._pipelined is None and self._may_be_ahead and isinstance(runner, AheadRunner) else None
        self._launcher = self._pipelined or self._ahead

    @property
    def is_drained(self) -> bool:
        """Whether no step is in flight."""
        return not self._steps

    @property
    def is_ahead(self) -> bool:
        """Whether steps are launched ahead."""
        return self._ahead is not None

    def run(self) -> None:
        """Commit one step, and leave at most one in flight (with pipeline stages, one less than there are stages).

        No effect if there is nothing to do.

        A BaseException in the runner that is no Exception is raised after the state is consistent: the affected steps have
        failed, and are committed now or by the next calls. DeviceLostError too, since later steps would fail in the same way.
        """
        if self._pipelined is not None:
            self._fill_stages(self._pipelined.num_stages)
            if self._steps:
                self._finish(self._steps[0])
            return
        if not self._steps:
            self._launch(self._scheduler.schedule)
            if not self._steps:
                return
        running = self._steps[0].launched
        if len(self._steps) == 1 and running is not None and running.allows_next:
            self._launch(self._scheduler.schedule_ahead)
        self._finish(self._steps[0])

    def _fill_stages(self, num_stages: int) -> None:
        """Launch steps until each stage has one, or there are no more sequences.

        A step that could not be launched is committed first: others may read what it was to load.
        """
        while (num_steps := len(self._steps)) < num_stages and all(step.launched is not None for step in self._steps):
            self._launch(self._scheduler.schedule_pipelined)
            if len(self._steps) == num_steps:
                return

    def save_pages(self) -> bool:
        """Run a step that saves cached blocks to the tiers, if nothing is in flight; return whether there were any."""
        return self._move_pages(self._scheduler.schedule_saves)

    def move_pages(self) -> bool:
        """Run a step that only saves the pages that are to be saved; return whether there were any."""
        return self._move_pages(self._scheduler.schedule_moves)

    def _move_pages(self, schedule: Callable[[float], StepPlan | None]) -> bool:
        if self._steps:
            return False
        self._launch(schedule)
        if not self._steps:
            return False
        self._finish(self._steps[0])
        return True

    def drain(self) -> None:
        """Commit the steps in flight without launching others; steps on a lost device fail."""
        while self._steps:
            with suppress(DeviceLostError):  # the step's failure is already recorded and logged
                self._finish(self._steps[0])

    def _launch(self, schedule: Callable[[float], StepPlan | None]) -> None:
        started_s = time.monotonic()
        plan = schedule(started_s)
        if plan is None:
            return
        shares, attended = describe_plan(self._scheduler, plan, self._windows) if self.is_recording else ([], [])
        step = _Step(plan, started_s, shares, attended)
        self._steps.append(step)
        if self._launcher is None:
            if self._runner is None:
                raise InvariantError(f"step {plan.step_id} is planned, but there is no runner")
            step.launched = _SynchronousStep(self._runner, plan)
            return
        try:
            step.launched = self._launcher.launch(plan)
        except Exception as error:
            logger.exception("step %d could not be launched", plan.step_id)
            step.failure = _describe(error)
            if isinstance(error, DeviceLostError):
                raise
        except BaseException as error:
            step.failure = type(error).__name__
            raise

    def _finish(self, step: _Step) -> None:
        """Wait for the oldest step in flight, and commit it."""
        if step.launched is None:
            self._end(step, _failed(step.plan, step.failure))
            return
        try:
            result = step.launched.collect()
        except Exception as error:
            logger.exception("step %d failed", step.plan.step_id)
            result = _failed(step.plan, _describe(error))
            if isinstance(error, DeviceLostError):
                self._end(step, result)
                raise
        except BaseException as error:  # a second Ctrl-C, or a signal handler that ends the program
            self._end(step, _failed(step.plan, type(error).__name__))
            raise
        self._end(step, result)

    def _end(self, step: _Step, result: StepResult) -> None:
        del self._steps[0]
        started_s, timelines = max(step.started_s, self._last_end_s), self._scheduler.timelines
        if timelines is not None:
            timelines.note_step(step.plan, result, started_s, time.monotonic())
        self._commit(step.plan, result)
        if self.is_recording or timelines is not None:
            self._last_end_s = time.monotonic()
        if self.is_recording:
            duration_s = self._last_end_s - started_s
            self.last_step = StepRecord(step.plan.step_id, started_s, duration_s, step.attended, step.shares)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _failed(plan: StepPlan, reason: str) -> StepResult:
    """Return the result of a failed step."""
    errors = dict.fromkeys(plan.num_scheduled_tokens, f"the step failed: {reason}")
    return StepResult(plan.step_id, {}, {}, {}, errors, is_failed=True)
