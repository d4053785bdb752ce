"""Random lives of a scheduler with compressed requests: every output is that of an isolated run, and nothing leaks."""

import random
from dataclasses import replace

import pytest
from random_lives import fail_some, random_config, random_request, seeds
from reference_model import make_config, make_request
from scheduling_fakes import Driver

from quire.base.errors import RequestError
from quire.engine.scheduling.eviction import EvictionRule


def random_compression(rng, block_size):
    fields = {
        "method": rng.choice(["streaming", "key_norm", "snapkv", "adaptive"]),
        "sink_tokens": rng.choice([0, 1, 4]),
        "recent_tokens": rng.choice([1, 2, 5]),
        "after_tokens": rng.choice([None, None, 3, 9]),
    }
    if fields["method"] == "adaptive":
        return {**fields, "attention_mass": rng.choice([0.3, 0.8, 1.0])}
    if fields["method"] != "streaming" and rng.random() < 0.4:
        return {**fields, "compression_ratio": rng.choice([0.0, 0.5, 0.9])}
    sinks = -(-fields["sink_tokens"] // block_size) * block_size
    return {**fields, "budget_tokens": sinks + 2 * block_size + fields["recent_tokens"] + rng.choice([0, 1, 5])}


def compressed_request(rng, name, prefixes, block_size):
    request = random_request(rng, name, prefixes)
    if request.pooling is not None or request.params.num_sequences > 1 or rng.random() < 0.2:
        return request
    return replace(request, params=replace(request.params, kv_compression=random_compression(rng, block_size)))


def live(seed, num_events=80, late_share=0.0, **options):
    rng = random.Random(seed)
    config = replace(random_config(rng), **options)
    driver = Driver(config, seed=seed, max_drafts=(0, 1, 4, 9)[seed % 4])
    prefixes = [[rng.randrange(3) for _ in range(rng.randint(0, 24))] for _ in range(3)]
    lateness = random.Random(seed)
    driver.worker.may_be_late = lambda request: lateness.random() < late_share
    num_added = 0
    for _ in range(num_events):
        if rng.random() < 0.3 and sum(1 for _ in driver.scheduler.iter_sequences()) < 24:
            num_added += 1
            try:
                driver.add(compressed_request(rng, num_added, prefixes, config.block_size))
            except RequestError as error:
                assert error.param in ("prompt", "max_tokens")  # noqa: PT017
        elif rng.random() < 0.04 and num_added:
            driver.abort(rng.randint(1, num_added))
        plan = driver.schedule()
        if plan is None:
            continue
        result = driver.worker.execute(plan)
        driver.commit(plan, fail_some(rng, result, plan) if rng.random() < 0.02 else result)
    driver.run()
    driver.check_outputs()
    driver.worker.may_be_late = lambda request: False
    driver.flush()
    return driver


@pytest.mark.one_in(5, keep=False)  # odd: the share of late answers alternates
@pytest.mark.parametrize("seed", seeds(0, 64, num_fast=32))
def test_outputs_equal_isolated_runs_when_blocks_are_evicted(seed):
    live(seed, late_share=0.2 * (seed % 2))


@pytest.mark.parametrize("seed", seeds(100, 16, num_fast=4))
def test_outputs_equal_isolated_runs_when_blocks_are_evicted_and_saved_to_a_tier(seed):
    live(seed, num_host_pages=6, kv_save="all", rope_switch_len=None)


def test_random_events_reach_every_mechanism():
    drivers = [live(seed) for seed in range(12)]
    assert sum(driver.scheduler.num_evicted_blocks for driver in drivers) > 30
    assert sum(driver.scheduler.num_preemptions for driver in drivers) > 5
    evicted = {key for driver in drivers for plan in driver.worker.plans for key in plan.evicted_blocks or {}}
    assert any(key in (plan.num_draft_slots or {}) for driver in drivers for plan in driver.worker.plans for key in evicted)


def test_a_prompt_and_an_output_beyond_the_pool_are_served_only_with_compression():
    config = make_config(num_kv_blocks=8, max_model_len=200)  # 32 tokens
    streaming = {"method": "streaming", "budget_tokens": 16, "after_tokens": 12}
    driver = Driver(config)
    with pytest.raises(RequestError, match="the prompt has 60 tokens"):
        driver.add(make_request("plain", 60, max_tokens=90))
    driver.add(make_request("long", 60, max_tokens=90, kv_compression=streaming))
    held = []
    while driver.step() is not None:
        held.append(config.num_kv_blocks - driver.scheduler.kv.pool.num_free)
    driver.check_outputs()
    assert len(driver.outputs["long", 0].tokens) == 90
    assert max(held) == 4  # 16 tokens; 17 before each eviction


@pytest.mark.parametrize(
    ("fields", "lengths"),
    [
        ({"method": "streaming", "budget_tokens": 16}, [40, 41, 45, 49]),
        ({"method": "streaming", "budget_tokens": 60}, [61, 65, 69]),
        ({"method": "streaming", "budget_tokens": 20, "after_tokens": 10}, [21, 25, 29, 33]),
        ({"method": "snapkv", "budget_tokens": 20, "recent_tokens": 4}, [40]),
        ({"method": "key_norm", "compression_ratio": 0.5, "recent_tokens": 4}, [40]),
        ({"method": "adaptive", "attention_mass": 0.5}, [40]),
    ],
    ids=["streaming", "long budget", "in the prompt", "snapkv", "ratio", "adaptive"],
)
def test_lengths_of_evictions(fields, lengths):
    rule = EvictionRule.of(make_request("a", 40, kv_compression=fields).params.kv_compression, 40, 4)
    found, num_computed, num_dropped = [], 0, 0
    while len(found) < len(lengths) and (next_len := rule.next_len(num_computed, num_dropped)) is not None:
        found.append(next_len)
        scores = [1.0] * rule.num_scored(next_len, num_dropped) if rule.compression.needs_scores else None
        num_dropped += 4 * len(rule.choose(next_len, num_dropped, scores))
        num_computed = next_len
        budget = rule.budget_tokens
        assert budget is None or num_computed - num_dropped <= budget
    assert found == lengths
