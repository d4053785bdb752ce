"""One simulated replica: the real scheduler, and a runner that takes the model's time in place of computing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from quire.base.ids import RequestId, SequenceId
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.contracts.scheduler_config import SchedulerConfig
from quire.contracts.step import StepPlan, StepResult
from quire.engine.scheduling import Scheduler, SequenceUpdate
from quire.planner.step_time import StepTime, StepWork
from quire.simulate.batching import Batching, BatchQueue
from quire.simulate.tiers import DiskPages, ReplicaTiers, TierOptions
from quire.simulate.workload import SimulatedRequest

_MAX_DECODE_RUN = 64
"""Decode steps that are made at once at most."""


@dataclass(frozen=True, slots=True)
class _Running:
    """What is under way: one step, or a run of decode steps of the same sequences. ends_s: when each of them ends."""

    plan: StepPlan
    result: StepResult
    ends_s: list[float]


class SimulatedReplica:
    """Makes steps on a virtual clock, one at a time.

    While the same sequences decode and nothing can come between, a run of steps is planned and committed as one, by the books
    that the scheduler has for accepted drafts: a plan with k draft slots stands for 1 + k steps. Each keeps its own time.

    windows  of the model's attention, in the order of StepWork.attended
    tiers    of its KV cache; None: it has none
    """

    def __init__(
        self,
        config: SchedulerConfig,
        times: StepTime,
        windows: Sequence[int | None],
        batching: Batching,
        rng: random.Random,
        tiers: TierOptions | None = None,
        disk: DiskPages | None = None,
    ) -> None:
        self.scheduler = Scheduler(config)
        self.queue = BatchQueue(batching)
        self.num_steps = 0
        self.busy_s = 0.0
        self.tiers = None if tiers is None else ReplicaTiers(tiers, self.scheduler, disk)
        self._times = times
        self._windows = tuple(windows)
        self._rng = rng
        self._running: _Running | None = None

    @property
    def is_running(self) -> bool:
        """Whether a step is under way."""
        return self._running is not None

    @property
    def num_unfinished(self) -> int:
        """Requests that run or wait, also for pages."""
        num_aside = 0 if self.tiers is None else self.tiers.num_aside
        return len(self.queue) + self.scheduler.num_waiting + self.scheduler.num_running + num_aside

    @property
    def busy_until_s(self) -> float | None:
        """When what is under way ends; None: nothing is."""
        return None if self._running is None else self._running.ends_s[-1]

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait."""
        scheduler = self.scheduler
        waiting = iter(scheduler.waiting)
        return self.queue.num_tokens + sum(one.num_uncomputed_tokens for one in waiting)

    def begin(self, now: float, horizon_s: float) -> float | None:
        """Start the next step; return when it ends, or None where there is nothing to compute.

        horizon_s  nothing comes to this replica before it, so that steps that end until then may be made at once
        """
        for request in self.queue.take(not self.scheduler.has_unfinished, now):
            self.scheduler.add(request, now)
        plan = self.scheduler.schedule(now) if self.scheduler.has_unfinished else None
        if plan is None:
            return None
        spans, sampled = self.spans(plan)
        num_drafts = self._num_drafts(plan)
        copy_s = 0.0 if self.tiers is None else self.tiers.copy_s(plan)
        ends_s = self._end_times(spans, len(sampled), now + copy_s, horizon_s, 1 + num_drafts)
        if self.tiers is not None:
            self.tiers.note_step(plan, ends_s[0] - now, ends_s[0])
        self._running = _Running(plan, self._result(plan, sampled, len(ends_s)), ends_s)
        self.num_steps += len(ends_s)
        self.busy_s += ends_s[-1] - now
        return ends_s[-1]

    def end(self, now: float) -> tuple[list[SequenceUpdate], list[float]]:
        """Commit what is under way; return its news, and when each of its steps ended."""
        assert self._running is not None
        running = self._running
        self._running = None
        return self.scheduler.commit(running.plan, running.result, now), running.ends_s

    def spans(self, plan: StepPlan) -> tuple[list[tuple[int, int]], list[SequenceId]]:
        """Return (computed, new) tokens of each sequence of a plan, and those that get a token."""
        find = self.scheduler.sequence
        spans: list[tuple[int, int]] = []
        sampled: list[SequenceId] = []
        for sequence_id, num_tokens in plan.num_scheduled_tokens.items():
            sequence = find(sequence_id)
            start = sequence.num_computed_tokens
            spans.append((start, num_tokens))
            if start + num_tokens == len(sequence.token_ids):
                sampled.append(sequence_id)
        return spans, sampled

    def _num_drafts(self, plan: StepPlan) -> int:
        """Return how many decode steps may follow the first: as many as every sequence has slots for."""
        slots = plan.num_draft_slots
        if not slots or len(slots) < len(plan.num_scheduled_tokens) or self.scheduler.num_waiting:
            return 0
        return min(slots.values())

    def _end_times(
        self, spans: list[tuple[int, int]], num_sampled: int, now: float, horizon_s: float, num_steps: int
    ) -> list[float]:
        """Return when each of up to num_steps steps ends, at least one, and no further one after horizon_s.

        Within a run the expected time is interpolated: it grows by what the contexts grow.
        """
        first = StepWork.of_spans(spans, self._windows, num_sampled)
        step_s, growth_s = self._times.mean_s(first), 0.0
        if num_steps > 1:
            longest = [(start + num_steps - 1, count) for start, count in spans]
            last_s = self._times.mean_s(StepWork.of_spans(longest, self._windows, num_sampled))
            growth_s = (last_s - step_s) / (num_steps - 1)
        ends_s: list[float] = []
        for _ in range(num_steps):
            now += step_s * self._times.draw_ratio(first, self._rng)
            if ends_s and now > horizon_s:
                break
            ends_s.append(now)
            step_s += growth_s
        return ends_s

    def _result(self, plan: StepPlan, sampled: list[SequenceId], num_steps: int) -> StepResult:
        """Return the tokens of a run of steps, and ask for slots for the next."""
        tokens = (0,) * num_steps
        requested = self._num_requested(len(plan.num_scheduled_tokens))
        return StepResult(
            plan.step_id,
            dict.fromkeys(sampled, tokens),
            {},
            {},
            {},
            verified={} if num_steps == 1 else dict.fromkeys(sampled, (num_steps - 1, num_steps - 1)),
            draft_requests=dict.fromkeys(sampled, requested) if requested > 0 else {},
        )

    def _num_requested(self, num_sequences: int) -> int:
        """Return how many steps of a run to ask for: none where others wait, or where blocks are short."""
        scheduler = self.scheduler
        if scheduler.num_waiting:
            return 0
        config = scheduler.config
        blocks_each = 2 + _MAX_DECODE_RUN // config.block_size
        windows = scheduler.kv.windows
        num_free = scheduler.kv.pool.num_free if windows is None else min(scheduler.kv.pool.num_free, windows.pool.num_free)
        if num_free < 2 * blocks_each * num_sequences:
            return 0
        return min(_MAX_DECODE_RUN, config.max_num_batched_tokens // num_sequences) - 1


def make_request(simulated: SimulatedRequest, num_done: int = 0) -> Request:
    """Return the request that the scheduler and the router see: it ends by its length.

    num_done  output tokens that another replica has generated
    """
    return Request(
        request_id=RequestId(str(simulated.index)),
        prompt_token_ids=simulated.prompt(),
        params=SamplingParams(max_tokens=simulated.num_output_tokens, ignore_eos=True),
        seed=0,
        arrival_time_s=simulated.due_s,
        output_token_ids=(0,) * num_done,
    )
