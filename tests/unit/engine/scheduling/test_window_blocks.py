"""The window group of the KV cache: block tables for layers that keep only the last tokens of a sequence."""

import random

import pytest
from random_lives import fail_some, random_config, random_request, seeds, with_window
from reference_model import make_config, make_request
from scheduling_fakes import Driver

from quire.base.errors import ConfigError, RequestError


def live(seed, num_events, late_share=0.0):
    """Return a driver that has lived through random events with a window group, and then drained."""
    rng = random.Random(seed)
    config = with_window(random_config(rng), rng)
    driver = Driver(config, max_sampled=rng.choice([1, 1, 1, 3]), seed=seed, max_drafts=(0, 1, 4, 9)[seed % 4])
    if late_share:
        lateness = random.Random(seed)
        driver.worker.may_be_late = lambda request: lateness.random() < late_share
    prefixes = [[rng.randrange(3) for _ in range(rng.randint(0, 24))] for _ in range(3)]
    names: list[int] = []

    def act():
        event = rng.random()
        if event < 0.4 and sum(1 for _ in driver.scheduler.iter_sequences()) < 24:
            names.append(len(names))
            try:
                driver.add(random_request(rng, names[-1], prefixes))
            except RequestError as error:
                assert error.param in ("prompt", "max_tokens")  # noqa: PT017
        elif event < 0.44 and names:
            driver.abort(rng.choice(names[-8:]))

    for _ in range(num_events):
        act()
        plan = driver.schedule()
        if plan is None:
            continue
        result = driver.worker.execute(plan)
        act()  # while the plan is in flight
        driver.commit(plan, fail_some(rng, result, plan) if rng.random() < 0.02 else result)
    driver.run()
    driver.check_outputs()
    driver.worker.may_be_late = lambda request: False
    driver.flush()
    return driver


@pytest.mark.one_in(4, keep=False)
@pytest.mark.parametrize("seed", seeds(0, 100, 40))
def test_every_output_is_that_of_an_isolated_run_when_window_blocks_are_reused(seed):
    live(seed, num_events=150)


@pytest.mark.one_in(3, keep=False)
@pytest.mark.parametrize("seed", seeds(500, 40, 10))
def test_every_output_is_that_of_an_isolated_run_when_masks_are_late(seed):
    live(seed, num_events=120, late_share=0.2)


def test_masks_are_late_in_lives_with_late_masks():
    """Not in every one: a pool of three tokens serves next to nothing."""
    assert all(live(seed, num_events=120, late_share=0.2).worker.num_late > 5 for seed in (505, 511))


def window_driver(num_window_blocks=8, **options):
    """Blocks of 4 tokens, a window of 8: a sequence that decodes holds at most (8 + 1) / 4 + 2 of them."""
    options = {"max_num_batched_tokens": 8, "max_model_len": 128, "num_kv_blocks": 64, **options}
    return Driver(make_config(window_tokens=8, num_window_blocks=num_window_blocks, **options))


def test_a_long_sequence_takes_only_the_window_blocks_of_its_window():
    driver = window_driver(num_window_blocks=6)
    driver.add(make_request("a", 80, max_tokens=40))
    most = 0
    while driver.step() is not None:
        windows = driver.scheduler.kv.windows
        most = max(most, windows.pool.num_blocks - windows.pool.num_free)
    driver.check_outputs()
    assert max(len(row) for row in [driver.outputs["a", 0].tokens]) == 40
    # 8 tokens of the window and 8 of the chunk: 4 blocks, which start at a block border here.
    assert most <= 4


def test_a_prefix_is_hit_as_far_as_its_last_window_is_kept():
    driver = window_driver(num_window_blocks=40, max_num_batched_tokens=64)
    driver.add(make_request("a", 41, max_tokens=1))
    driver.run()
    driver.add(make_request("b", 41, max_tokens=1))
    plan = driver.schedule()
    assert plan.starts[0].num_computed_tokens == 40
    assert plan.starts[0].window_blocks[0][0] == (40 - 8) // 4
    driver.commit(plan, driver.worker.execute(plan))
    driver.run()
    driver.check_outputs()


def test_a_prefix_is_computed_again_when_its_window_blocks_are_gone_and_is_hit_afterwards():
    driver = window_driver(num_window_blocks=20, num_kv_blocks=64, max_num_batched_tokens=64)
    driver.add(make_request("a", 41, max_tokens=1))
    driver.run()
    windows = driver.scheduler.kv.windows
    windows.pool.free(windows.pool.allocate(20))  # something else is written to all of them
    assert driver.scheduler.kv.num_cached_tokens(make_sequence(driver, 41), 0) == 40
    driver.add(make_request("b", 41, max_tokens=1))
    plan = driver.schedule()
    assert plan.starts[0].num_computed_tokens == 0
    driver.commit(plan, driver.worker.execute(plan))
    driver.run()
    driver.add(make_request("c", 41, max_tokens=1))
    assert driver.schedule().starts[0].num_computed_tokens == 40


def test_the_window_of_a_prompt_is_kept_while_long_outputs_pass_through_the_pool():
    driver = window_driver(num_window_blocks=12, num_kv_blocks=200, max_num_batched_tokens=16)
    driver.add(make_request("a", 41, max_tokens=80))
    driver.run()
    driver.add(make_request("b", 41, max_tokens=1))
    assert driver.schedule().starts[0].num_computed_tokens == 40


def test_the_window_where_prompts_diverge_is_kept_once_it_is_known():
    driver = window_driver(num_window_blocks=14, num_kv_blocks=200, max_num_batched_tokens=16)
    system = [5] * 40
    starts = []
    for name in range(4):
        driver.add(make_request(name, system + [name] * 40, max_tokens=1))
        starts.append(driver.schedule())
        driver.commit(starts[-1], driver.worker.execute(starts[-1]))
        driver.run()
    computed = [plan.starts[0].num_computed_tokens for plan in starts]
    assert computed == [0, 0, 40, 40]
    driver.check_outputs()


def make_sequence(driver, num_prompt):
    from quire.engine.scheduling.admission import new_sequence

    return new_sequence(make_request("probe", num_prompt), driver.config, 99, 0, 0, 0.0)


def test_twice_the_sequences_run_at_once_with_the_window_limited():
    """Eight window blocks hold two sequences of 40 tokens, of 10 blocks each."""
    driver = window_driver(num_window_blocks=9, max_num_batched_tokens=8)
    for name in range(2):
        driver.add(make_request(name, [name] * 36, max_tokens=4))
    most = 0
    while driver.step() is not None:
        most = max(most, driver.scheduler.num_running)
    driver.check_outputs()
    assert most == 2
    assert driver.scheduler.num_preemptions == 0


def test_forks_share_window_blocks():
    driver = window_driver(num_window_blocks=12, max_num_batched_tokens=16)
    driver.add(make_request("a", 30, n=3, max_tokens=20))
    driver.run()
    driver.check_outputs()


def test_too_few_window_blocks_are_refused():
    with pytest.raises(ConfigError, match=r"num_window_blocks.*6"):
        make_config(window_tokens=8, num_window_blocks=5, max_num_batched_tokens=8)


def test_models_with_one_group_have_no_window_in_their_plans():
    driver = Driver(make_config())
    driver.add(make_request("a", 30, max_tokens=20))
    plans = []
    while (plan := driver.step()) is not None:
        plans.append(plan)
    assert all(plan.window_blocks is None and not plan.window_copies for plan in plans)
    assert all(not start.window_blocks for plan in plans for start in plan.starts)
