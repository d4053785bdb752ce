"""A device that runs steps some time after their launch, and a driver that lets the step loop launch ahead of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from random_lives import fail_some
from scheduling_fakes import Driver, LatePages

from quire.base.ids import SequenceId
from quire.contracts.request import Request
from quire.contracts.scheduler_config import SchedulerConfig
from quire.contracts.step import StepPlan, StepResult
from quire.engine.scheduling import Scheduler, check_invariants
from quire.engine.scheduling.step_loop import StepLoop


class CheckedScheduler(Scheduler):
    """Sees that no block is given out while a step in flight may write it."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.writes: dict[int, set[int]] = {}
        self.num_ahead = 0
        self.num_refused_ahead = 0
        reuse = self.kv.pool.on_reuse

        def check(block_id):
            for plan in self.in_flight:
                assert block_id not in self.writes[plan.step_id], f"step {plan.step_id} may still write block {block_id}"
            reuse(block_id)

        self.kv.pool.on_reuse = check

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        plan = super().schedule(now)
        assert (plan is not None) == self.has_unfinished
        return self._checked(plan)

    def schedule_ahead(self, now: float = 0.0) -> StepPlan | None:
        num_preemptions = self.num_preemptions
        plan = super().schedule_ahead(now)
        assert self.num_preemptions == num_preemptions
        self.num_ahead += plan is not None
        self.num_refused_ahead += plan is None and self.has_unfinished
        return self._checked(plan)

    def _checked(self, plan: StepPlan | None) -> StepPlan | None:
        check_invariants(self)
        if plan is None:
            return None
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        threshold, size = self.config.long_prefill_token_threshold, self.config.block_size
        assert not threshold or max(plan.num_scheduled_tokens.values(), default=0) <= threshold
        written = self.writes[plan.step_id] = set()
        for sequence_id, num_tokens in plan.num_scheduled_tokens.items():
            sequence = self.sequence(sequence_id)
            start = sequence.num_computed_tokens + self.in_flight.num_tokens_before(plan, sequence_id)
            assert start + num_tokens < sequence.max_total_tokens, "a token behind the last one is planned"
            written.update(sequence.block_ids[start // size : -(-(start + num_tokens) // size)])
        return plan


@dataclass
class FakeStep:
    """A step in the queue of the device."""

    device: FakeDevice
    plan: StepPlan
    allows_next: bool
    is_broken: bool = False
    result: StepResult | None = None

    def collect(self) -> StepResult:
        return self.device.collect(self)


class FakeDevice(LatePages):
    """Runs launched steps in order at random times, at the latest when their result is awaited.

    samples_on_host  says of a request whether its tokens reach the device only when they are collected
    """

    def __init__(self, config: SchedulerConfig, seed: int, samples_on_host: Callable[[Request], bool]) -> None:
        super().__init__(config, seed=seed)
        self._samples_on_host = samples_on_host
        self._requests: dict[SequenceId, Request] = {}
        self.queue: list[FakeStep] = []  # launched, and not run
        self.uncollected: list[FakeStep] = []
        self.log: list[tuple[str, int]] = []
        self.failing_launches: Callable[[], bool] = lambda: False
        self.failing_collections: Callable[[], bool] = lambda: False
        self.spoil: Callable[[StepResult, StepPlan], StepResult] = lambda result, plan: result
        self.between: Callable[[], None] = lambda: None

    def launch(self, plan: StepPlan) -> FakeStep:
        assert len(self.uncollected) < 2
        assert all(step.allows_next for step in self.uncollected), "the tokens of the step before are not there"
        self._requests.update({start.sequence_id: start.request for start in plan.starts})
        requests = [self._requests[sequence_id] for sequence_id in plan.num_scheduled_tokens]
        step = FakeStep(self, plan, not any(self._samples_on_host(request) for request in requests))
        self.log.append(("launch", plan.step_id))
        self.queue.append(step)
        self.between()
        if self.failing_launches():
            step.is_broken = True  # its changes of rows may be known, but it computes nothing
            raise MemoryError("no room")
        self.uncollected.append(step)
        self._run(self.rng.randint(0, len(self.queue)))
        return step

    def collect(self, step: FakeStep) -> StepResult:
        assert self.uncollected.pop(0) is step
        self.between()
        while step.result is None:
            self._run(1)
        self.log.append(("collect", step.plan.step_id))
        if self.failing_collections():
            self.fail(step.plan.step_id, step.result.moved_steps or ())
            raise RuntimeError("the device has stumbled")
        return self.spoil(step.result, step.plan)

    def close(self) -> None:
        assert not self.uncollected

    def _run(self, count: int) -> None:
        for step in self.queue[:count]:
            if step.is_broken:
                self.next_step_id += 1
                self._apply(step.plan)
            else:
                step.result = self.execute(step.plan)
        del self.queue[:count]


class AheadDriver(Driver):
    """Lets a step loop step, ahead or not."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        seed: int = 0,
        is_ahead: bool = True,
        samples_on_host: Callable[[Request], bool] = lambda request: False,
    ) -> None:
        super().__init__(config, seed=seed)
        self.scheduler = CheckedScheduler(config)
        self.worker = FakeDevice(config, seed, samples_on_host)
        self.loop = StepLoop(self.scheduler, self.worker if is_ahead else Launchless(self.worker), self.commit)

    def step(self) -> None:
        self.loop.run()
        check_invariants(self.scheduler)

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished and self.loop.is_drained:
                return
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")

    def spoil_some(self, rng: random.Random, share: float) -> None:
        """Let launches and steps fail now and then, and single sequences in them."""
        self.worker.failing_launches = lambda: rng.random() < share
        self.worker.failing_collections = lambda: rng.random() < share
        self.worker.spoil = lambda result, plan: fail_some(rng, result, plan) if rng.random() < share else result


@dataclass
class Launchless:
    """A runner that can only execute."""

    device: FakeDevice

    def execute(self, plan: StepPlan) -> StepResult:
        return self.device.launch(plan).collect()

    def close(self) -> None:
        self.device.close()
