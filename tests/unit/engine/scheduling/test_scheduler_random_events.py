"""Seeded random lives of a scheduler: whatever happens, every output is that of an isolated run and nothing leaks."""

import functools
import random
from dataclasses import replace

import pytest
from random_lives import fail_some, random_config, random_request, seeds, with_homes, with_places
from reference_model import make_config, make_request
from scheduling_fakes import Driver

from quire.base.errors import RequestError
from quire.contracts.block_keys import block_key
from quire.contracts.step import StepResult
from quire.engine.scheduling import invariants, kv_allocator


def live(seed, num_events, late_share=0.0, divide=None, **options):
    """Return a driver that has lived through num_events random events and then drained."""
    rng = random.Random(seed)
    config = replace(random_config(rng), **options)
    config = config if divide is None else divide(config, rng)
    driver = Driver(config, max_sampled=rng.choice([1, 1, 1, 3]), seed=seed, max_drafts=(0, 1, 4, 9)[seed % 4])
    prefixes = [[rng.randrange(3) for _ in range(rng.randint(0, 24))] for _ in range(3)]
    if late_share:
        lateness = random.Random(seed)
        driver.worker.may_be_late = lambda request: lateness.random() < late_share
    names: list[int] = []
    add_share = rng.choice([0.1, 0.25, 0.5])

    def act():
        event = rng.random()
        if event < add_share and sum(1 for _ in driver.scheduler.iter_sequences()) < 24:
            names.append(len(names))
            try:
                driver.add(random_request(rng, names[-1], prefixes))
            except RequestError as error:
                assert error.param in ("prompt", "max_tokens")  # noqa: PT017
        elif event < add_share + 0.04 and names:
            driver.abort(rng.choice(names[-8:]))

    for _ in range(num_events):
        act()
        plan = driver.schedule()
        if plan is None:
            continue
        result = driver.worker.execute(plan)
        act()  # while the plan is in flight
        if rng.random() < 0.02:
            result = fail_some(rng, result, plan)
        driver.commit(plan, result)
    driver.run()
    driver.check_outputs()
    driver.worker.may_be_late = lambda request: False
    driver.flush()
    return driver


@pytest.fixture
def weak_hash(monkeypatch):
    """Let only five keys exist, so that nearly every lookup is a collision."""

    def weak_key(parent_key, token_ids):
        return block_key(parent_key, token_ids) % 5

    for module in (kv_allocator, invariants):
        monkeypatch.setattr(module, "block_key", weak_key)


@functools.cache
def ordinary_life(seed):
    """Return a driver after its life, which several tests look at."""
    return live(seed, num_events=80)


@pytest.mark.one_in(4, keep=False)
@pytest.mark.parametrize("seed", seeds(0, 72, num_fast=48))
def test_outputs_equal_isolated_runs_when_events_are_random(seed):
    ordinary_life(seed)


@pytest.mark.one_in(4, keep=False)
@pytest.mark.parametrize("seed", seeds(0, 72, num_fast=24))
def test_outputs_equal_isolated_runs_when_blocks_are_at_several_places(seed):
    live(seed, num_events=80, divide=with_places)


@pytest.mark.one_in(4, keep=False)
@pytest.mark.parametrize("seed", seeds(0, 72, num_fast=24))
def test_outputs_equal_isolated_runs_when_sequences_have_homes(seed):
    live(seed, num_events=80, divide=with_homes)


@pytest.mark.one_in(4, keep=False)  # in step with neither the checkpoints nor the share of late answers
@pytest.mark.parametrize("num_state_checkpoints", [0, 2, 30])
@pytest.mark.parametrize("seed", seeds(0, 36, num_fast=16))
def test_sequences_start_from_their_own_states_when_events_are_random(seed, num_state_checkpoints):
    live(seed, num_events=80, late_share=0.1 * (seed % 3), num_state_checkpoints=num_state_checkpoints, max_num_drafts=4)


@pytest.mark.covering
@pytest.mark.parametrize("seed", seeds(0, 36, num_fast=16))
@pytest.mark.parametrize("late_share", [0.1, 0.6])
def test_outputs_equal_isolated_runs_when_sequences_are_late(seed, late_share):
    live(seed, num_events=80, late_share=late_share)


@pytest.mark.one_in(3, keep=False)
@pytest.mark.parametrize("seed", seeds(1000, 30, num_fast=12))
def test_outputs_equal_isolated_runs_when_hashes_collide(seed, weak_hash):
    live(seed, num_events=80)


@pytest.mark.slow
def test_random_events_reach_every_mechanism():
    seen = {
        "preempted": 0,
        "copied": 0,
        "replaced": 0,
        "hit": 0,
        "chunked": 0,
        "started": 0,
        "pooled": 0,
        "pooled again": 0,
        "pooled after a hit": 0,
    }
    for seed in range(48):
        driver = ordinary_life(seed)
        seen["preempted"] += driver.scheduler.num_preemptions
        seen["hit"] += driver.scheduler.prefix_cache_hits
        embedded = [output.last for output in driver.outputs.values() if output.last and output.last.pooled]
        seen["pooled"] += len(embedded)
        seen["pooled again"] += sum(update.stats.num_preemptions for update in embedded)
        seen["pooled after a hit"] += sum(update.stats.num_cached_tokens > 0 for update in embedded)
        for plan in driver.worker.plans:
            seen["copied"] += len(plan.block_copies)
            seen["replaced"] += len(plan.replaced_blocks or {})
            seen["started"] += len(plan.starts)
            seen["chunked"] += sum(num_tokens > 1 for num_tokens in plan.num_scheduled_tokens.values())
    assert all(seen.values()), seen


def test_whole_step_failure_ends_its_sequences_when_committed_as_errors():
    driver = Driver(make_config())
    for name in range(3):
        driver.add(make_request(name, 6, seed=name, n=2, max_tokens=4))
    plan = driver.schedule()
    assert plan is not None
    driver.worker.execute(plan)
    errors = dict.fromkeys(plan.num_scheduled_tokens, "worker 0 died")
    driver.commit(plan, StepResult(plan.step_id, {}, {}, {}, errors))
    assert [driver.outputs[str(name), 0].reason for name in range(3)] == ["error"] * 3
    driver.run()
    driver.check_outputs()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10_000, 10_002))
def test_outputs_equal_isolated_runs_when_soaked(seed):
    for part in range(10):
        live(seed * 100 + part, num_events=300)
