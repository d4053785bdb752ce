"""Steps for pipeline stages: disjoint ones in flight at once, with the outputs of sequences that run alone."""

import functools
import random
from dataclasses import replace

import pytest
from ahead_fakes import FakeDevice, FakeStep
from random_lives import fail_some, random_config, random_request, seeds, with_window
from reference_model import make_config, make_request
from scheduling_fakes import Driver

from quire.base.errors import ConfigError, InvariantError, RequestError
from quire.base.ids import RequestId, SequenceId
from quire.contracts.step import StepResult
from quire.engine.scheduling import Scheduler, check_invariants
from quire.engine.scheduling.step_loop import StepLoop


class PipelinedScheduler(Scheduler):
    """Sees that the steps in flight are disjoint, and that each has no more than its share."""

    def __init__(self, config):
        super().__init__(config)
        self.most_in_flight = 0
        self.num_starved = 0
        self.num_preemptions_in_flight = 0

    def schedule_pipelined(self, now=0.0):
        busy = {key for plan in self.in_flight for key in plan.num_scheduled_tokens}
        num_preemptions, num_in_flight = self.num_preemptions, len(self.in_flight)
        free = [s for s in self.running if s.sequence_id not in busy and not s.is_mask_pending]
        plan = super().schedule_pipelined(now)
        check_invariants(self)
        if num_in_flight > 0:
            self.num_preemptions_in_flight += self.num_preemptions - num_preemptions
        if num_in_flight == 0:
            assert (plan is not None) == self.has_unfinished, "with nothing in flight there is always something to compute"
        if plan is None:
            self.num_starved += bool(free)
            return None
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        assert not busy & set(plan.num_scheduled_tokens), "a sequence is in two steps in flight"
        assert not busy & set(plan.ended), "the worker is told to forget a sequence that is in flight"
        assert plan.num_scheduled_tokens or num_in_flight == 0
        stages, config = self.config.num_pipeline_stages, self.config
        assert len(plan.num_scheduled_tokens) <= -(-config.max_num_seqs // stages)
        assert plan.num_tokens <= config.max_num_batched_tokens
        return plan


class Stages(FakeDevice):
    """A worker of several stages: steps run in order, at the latest when they are collected."""

    is_late = False

    def __init__(self, config, seed, max_drafts):
        super().__init__(config, seed, samples_on_host=lambda request: True)
        self.num_stages, self.max_drafts = config.num_pipeline_stages, max_drafts
        self.max_rows = 0

    def launch(self, plan):
        assert len(self.uncollected) < self.num_stages
        step = FakeStep(self, plan, allows_next=False)
        self.log.append(("launch", plan.step_id))
        self.queue.append(step)
        self.between()
        if self.failing_launches():
            step.is_broken = True
            raise MemoryError("no room")
        self.uncollected.append(step)
        self._run(self.rng.randint(0, len(self.queue)))
        self.max_rows = max(self.max_rows, len(self.rows))
        return step

    def collect(self, step):
        try:
            return super().collect(step)
        except RuntimeError:
            # A driver takes the masks that are ready last, so that a step that fails loses none of them.
            self._late += [key for key in step.result.mask_ready if key in self.rows]
            raise


class PipelinedDriver(Driver):
    """disk: pages by key, of steps that have saved them."""

    def __init__(self, config, *, seed=0, max_drafts=0):
        super().__init__(config, seed=seed)
        self.disk = {}
        self.scheduler = PipelinedScheduler(config)
        self.worker = Stages(config, seed, max_drafts)
        self.loop = StepLoop(self.scheduler, self.worker, self.commit)

    def commit(self, plan, result):
        for _, slot in () if result.is_failed else plan.page_saves:
            self.disk[self.scheduler.kv.host_tier.key_of(slot)] = list(self.worker.pages[slot])
        super().commit(plan, result)

    def read_pages(self, request_id, rng):
        """Read pages from the disk at once, while stages still compute, and hold them for a request."""
        tier = self.scheduler.kv.host_tier
        for key in rng.sample(sorted(self.disk), min(len(self.disk), 3)):
            for slot in tier.reserve(1):
                self.worker.pages[slot] = list(self.disk[key])
                tier.install(slot, key)
                tier.hold(request_id, [slot])

    def step(self):
        self.loop.run()
        check_invariants(self.scheduler)

    def run(self, max_steps=10_000):
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished and self.loop.is_drained:
                return
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")


def live(
    seed, num_events, num_stages, max_drafts=0, late_share=0.0, is_calm=False, has_window=False, has_tier=False, states=None
):
    """Return a driver that has lived through num_events random events and then drained; calm: nothing fails or is aborted.

    states  checkpoints of recurrent states; None: the model has none
    """
    rng = random.Random(seed)
    config = replace(random_config(rng), num_pipeline_stages=num_stages)
    config = with_window(config, rng) if has_window else config
    if states is not None:
        config = replace(config, num_state_checkpoints=states, max_num_drafts=4)
    if has_tier:
        num_pages, num_saves, kv_save = rng.choice([1, 2, 5, 20]), rng.choice([1, 3, 100]), rng.choice(["all", "write_through"])
        config = replace(
            config, enable_prefix_caching=True, num_host_pages=num_pages, max_page_saves=num_saves, kv_save=kv_save
        )
    driver = PipelinedDriver(config, seed=seed, max_drafts=max_drafts)
    if late_share:
        lateness = random.Random(seed + 2)
        driver.worker.may_be_late = lambda request: lateness.random() < late_share
    prefixes = [[rng.randrange(3) for _ in range(rng.randint(0, 24))] for _ in range(3)]
    names: list[int] = []
    add_share = rng.choice([0.1, 0.25, 0.5])
    accidents = random.Random(seed + 1)

    def abort_one():
        if names and accidents.random() < 0.04:
            driver.abort(accidents.choice(names[-8:]))

    if not is_calm:
        driver.worker.between = abort_one
        share = rng.choice([0.0, 0.02])
        driver.worker.failing_launches = lambda: accidents.random() < share
        driver.worker.failing_collections = lambda: accidents.random() < share
        if not max_drafts:
            driver.worker.spoil = lambda result, plan: (
                fail_some(accidents, result, plan) if accidents.random() < share else result
            )
    for _ in range(num_events):
        if rng.random() < add_share and len(names) < 30:
            names.append(len(names))
            try:
                driver.add(random_request(rng, names[-1], prefixes))
            except RequestError as error:
                assert error.param in ("prompt", "max_tokens")  # noqa: PT017
            else:
                if has_tier:
                    driver.read_pages(RequestId(str(names[-1])), rng)
        driver.step()
    driver.run()
    driver.check_outputs()
    assert not has_tier or driver.scheduler.kv.host_tier.num_pinned == 0
    assert driver.worker.max_rows <= 2 * config.max_num_seqs, "what the worker has batch slots for"
    flush(driver)
    return driver


@pytest.mark.covering
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("seed", seeds(900, 40, 8))
def test_every_output_is_that_of_an_isolated_run_with_a_window_group(seed, num_stages):
    live(seed, 120, num_stages, max_drafts=(0, 4)[seed % 2], has_window=True)


@pytest.mark.covering
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("seed", seeds(1300, 60, 8))
def test_every_output_is_that_of_an_isolated_run_with_a_host_tier(seed, num_stages):
    live(seed, 120, num_stages, max_drafts=(0, 4)[seed % 2], has_tier=True)


@pytest.mark.covering
@pytest.mark.parametrize("states", [0, 2, 30])
@pytest.mark.parametrize("seed", seeds(1700, 12, 3))
def test_sequences_start_from_their_own_states_when_events_are_random(seed, states):
    live(seed, 100, (2, 3)[seed % 2], max_drafts=(0, 4)[seed // 2 % 2], states=states)


def flush(driver):
    """Run one more request, so that the worker hears of every end; it must then have no other row."""
    driver.worker.between = lambda: None
    driver.worker.failing_launches = driver.worker.failing_collections = lambda: False
    driver.worker.spoil = lambda result, plan: result
    driver.worker.may_be_late = lambda request: False
    driver.add(make_request("flush", 1, max_tokens=1))
    driver.run()
    assert set(driver.worker.rows) == set(driver.worker.plans[-1].num_scheduled_tokens)
    assert driver.outputs[RequestId("flush"), 0].reason is not None


def make_scheduler(*requests, **options):
    scheduler = PipelinedScheduler(make_config(**options))
    for request in requests:
        scheduler.add(request)
    return scheduler


def commit(scheduler, plan, sampled):
    tokens = {SequenceId(key): (value,) for key, value in sampled.items()}
    updates = scheduler.commit(plan, StepResult(plan.step_id, tokens, {}, {}, {}))
    check_invariants(scheduler)
    return updates


def test_each_step_has_a_share_of_the_sequences():
    scheduler = make_scheduler(*(make_request(name, 3) for name in range(5)), num_pipeline_stages=2)
    first, second = scheduler.schedule_pipelined(), scheduler.schedule_pipelined()
    assert (list(first.num_scheduled_tokens), list(second.num_scheduled_tokens)) == ([0, 1, 2], [3, 4])
    with pytest.raises(InvariantError, match="2 steps are in flight, one for each pipeline stage"):
        scheduler.schedule_pipelined()
    commit(scheduler, first, dict.fromkeys(range(3), 1))
    third = scheduler.schedule_pipelined()
    assert third.num_scheduled_tokens == {0: 1, 1: 1, 2: 1}


def test_each_step_has_a_share_of_the_token_budget():
    scheduler = make_scheduler(
        make_request("a", 30), make_request("b", 30), num_pipeline_stages=2, max_num_batched_tokens=20, max_num_seqs=2
    )
    plans = [scheduler.schedule_pipelined() for _ in range(2)]
    assert [plan.num_scheduled_tokens for plan in plans] == [{0: 10}, {1: 10}]


def test_a_sequence_on_its_own_has_the_whole_budget_and_one_step_in_flight():
    scheduler = make_scheduler(make_request("a", 30), num_pipeline_stages=3, max_num_batched_tokens=20, max_num_seqs=2)
    assert scheduler.schedule_pipelined().num_scheduled_tokens == {0: 20}
    assert scheduler.schedule_pipelined() is None


def test_waiting_requests_without_blocks_do_not_count_for_the_share():
    scheduler = make_scheduler(
        *(make_request(name, 8) for name in range(4)), num_pipeline_stages=2, num_kv_blocks=4, block_size=4, max_model_len=16
    )
    plans = [scheduler.schedule_pipelined() for _ in range(2)]
    assert [list(plan.num_scheduled_tokens) for plan in plans] == [[0], [1]]


def test_a_sequence_in_flight_is_not_preempted_and_its_step_is_collected_first():
    requests = (make_request(name, 4, max_tokens=2) for name in "ab")
    scheduler = make_scheduler(*requests, num_pipeline_stages=2, num_kv_blocks=2, block_size=4, max_model_len=12)
    first, second = scheduler.schedule_pipelined(), scheduler.schedule_pipelined()
    commit(scheduler, first, {0: 1})
    assert scheduler.schedule_pipelined() is None  # the first needs a block, which only the second can give up
    assert scheduler.num_preemptions == 0
    commit(scheduler, second, {1: 1})
    assert scheduler.schedule_pipelined().num_scheduled_tokens == {0: 1}
    assert (scheduler.num_preemptions, scheduler.num_waiting) == (1, 1)


def test_the_last_sequence_gives_up_its_own_blocks_while_others_are_in_flight():
    requests = (make_request(name, 4, max_tokens=5) for name in "ab")
    scheduler = make_scheduler(*requests, num_pipeline_stages=2, num_kv_blocks=3, block_size=4, max_model_len=12)
    first, second = scheduler.schedule_pipelined(), scheduler.schedule_pipelined()
    commit(scheduler, first, {0: 1})
    third = scheduler.schedule_pipelined()  # takes the last block
    assert (list(second.num_scheduled_tokens), list(third.num_scheduled_tokens)) == ([1], [0])
    commit(scheduler, second, {1: 1})
    assert scheduler.schedule_pipelined() is None
    assert scheduler.num_preemptions == 1
    assert [sequence.sequence_id for sequence in scheduler.running] == [0]


def test_the_number_of_stages_is_checked():
    with pytest.raises(ConfigError, match="num_pipeline_stages must be an integer >= 1, got 0"):
        make_config(num_pipeline_stages=0)


@functools.cache
def ordinary_life(seed, num_stages):
    return live(seed, 80, num_stages)


@pytest.mark.covering
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", seeds(0, 36, num_fast=15))
def test_outputs_equal_isolated_runs_when_events_are_random(seed, num_stages):
    ordinary_life(seed, num_stages)


@pytest.mark.covering
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("seed", seeds(0, 24, num_fast=10))
def test_outputs_equal_isolated_runs_with_drafts(seed, num_stages):
    live(seed, 80, num_stages, max_drafts=3)


@pytest.mark.covering
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("seed", seeds(0, 24, num_fast=10))
def test_outputs_equal_isolated_runs_when_sequences_are_late(seed, num_stages):
    live(seed, 80, num_stages, late_share=(0.1, 0.6)[seed % 2])


@pytest.mark.slow
def test_random_events_reach_every_mechanism():
    seen = dict.fromkeys(("overlapped", "starved", "preempted", "preempted in flight", "copied", "hit", "chunked", "error"), 0)
    for seed in range(15):
        for num_stages in (2, 3, 4):
            driver = ordinary_life(seed, num_stages)
            seen["overlapped"] += driver.scheduler.most_in_flight > 1
            seen["starved"] += driver.scheduler.num_starved
            seen["preempted"] += driver.scheduler.num_preemptions
            seen["preempted in flight"] += driver.scheduler.num_preemptions_in_flight
            seen["hit"] += driver.scheduler.prefix_cache_hits
            seen["error"] += sum(output.reason == "error" for output in driver.outputs.values())
            for plan in driver.worker.plans:
                seen["copied"] += len(plan.block_copies)
                seen["chunked"] += sum(num_tokens > 1 for num_tokens in plan.num_scheduled_tokens.values())
    assert all(seen.values()), seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30_000, 30_002))
def test_outputs_equal_isolated_runs_when_soaked(seed):
    for part in range(10):
        live(seed * 100 + part, 300, num_stages=1 + part % 4, max_drafts=part % 2 * 2)
