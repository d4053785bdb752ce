"""One simulated replica: the real scheduler, and a runner that takes the model's time in place of computing."""

from __future__ import annotations

import random
from collections.abc import Sequence

from quire.base.ids import RequestId
from quire.contracts.config import SchedulerConfig
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.contracts.step import StepPlan, StepResult
from quire.engine.scheduling import Scheduler, SequenceUpdate
from quire.planner.step_time import StepTime, StepWork
from quire.simulate.batching import Batching, BatchQueue
from quire.simulate.workload import SimulatedRequest

_TOKEN = (0,)


class SimulatedReplica:
    """Makes steps on a virtual clock, one at a time.

    windows  of the model's attention, in the order of StepWork.attended
    """

    def __init__(
        self,
        config: SchedulerConfig,
        times: StepTime,
        windows: Sequence[int | None],
        batching: Batching,
        rng: random.Random,
    ) -> None:
        self.scheduler = Scheduler(config)
        self.queue = BatchQueue(batching)
        self.num_steps = 0
        self.busy_s = 0.0
        self.requests: dict[RequestId, Request] = {}  # on the way to the scheduler
        self._times = times
        self._windows = tuple(windows)
        self._rng = rng
        self._running: tuple[StepPlan, StepResult] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a step is under way."""
        return self._running is not None

    @property
    def num_unfinished(self) -> int:
        """Requests that run or wait."""
        return len(self.queue) + self.scheduler.num_waiting + self.scheduler.num_running

    def begin(self, now: float) -> float | None:
        """Start the next step; return when it ends, or None where there is nothing to compute."""
        for simulated in self.queue.take(not self.scheduler.has_unfinished, now):
            self.scheduler.add(self.requests.pop(RequestId(str(simulated.index))), now)
        plan = self.scheduler.schedule(now) if self.scheduler.has_unfinished else None
        if plan is None:
            return None
        work, result = self._execute(plan)
        duration_s = self._times.draw_s(work, self._rng)
        self._running = plan, result
        self.num_steps += 1
        self.busy_s += duration_s
        return now + duration_s

    def end(self, now: float) -> list[SequenceUpdate]:
        """Commit the step that is under way, and return its news."""
        assert self._running is not None
        plan, result = self._running
        self._running = None
        return self.scheduler.commit(plan, result, now)

    def _execute(self, plan: StepPlan) -> tuple[StepWork, StepResult]:
        """Return what a step computes, and the tokens that it brings."""
        find = self.scheduler.sequence
        spans: list[tuple[int, int]] = []
        sampled = {}
        for sequence_id, num_tokens in plan.num_scheduled_tokens.items():
            sequence = find(sequence_id)
            start = sequence.num_computed_tokens
            spans.append((start, num_tokens))
            if start + num_tokens == len(sequence.token_ids):
                sampled[sequence_id] = _TOKEN
        work = StepWork.of_spans(spans, self._windows, len(sampled))
        return work, StepResult(plan.step_id, sampled, {}, {}, {})


def make_request(simulated: SimulatedRequest) -> Request:
    """Return the request that the scheduler and the router see: it ends by its length."""
    return Request(
        request_id=RequestId(str(simulated.index)),
        prompt_token_ids=simulated.prompt(),
        params=SamplingParams(max_tokens=simulated.num_output_tokens, ignore_eos=True),
        seed=0,
        arrival_time_s=simulated.due_s,
    )
