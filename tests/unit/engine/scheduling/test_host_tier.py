"""The host tier: blocks that leave the pool are saved, found again and loaded; the outputs are those of an isolated run."""

import functools
import random
from dataclasses import replace

import pytest
from random_lives import random_config, random_request, seeds
from reference_model import make_config, make_request
from scheduling_fakes import Driver, LatePages

from quire.base.errors import InvariantError, RequestError
from quire.base.ids import BlockId, RequestId
from quire.contracts.step import StepResult
from quire.engine.scheduling.host_tier import HostTier

GARBAGE = -77


def tier_config(**options):
    return make_config(**{"num_kv_blocks": 8, "block_size": 4, "num_host_pages": 32, "kv_save": "all", **options})


def run_one(driver, name, prompt, **params):
    """Run a request alone, and return its cached tokens."""
    driver.add(make_request(name, prompt, max_tokens=2, **params))
    driver.run()
    return driver.outputs[str(name), 0].last.stats.num_cached_tokens


def test_prompt_is_found_in_the_host_tier_when_its_blocks_were_reused():
    driver = Driver(tier_config())
    first = list(range(24))
    assert run_one(driver, 0, first) == 0
    assert run_one(driver, 1, range(50, 78)) == 0  # takes all blocks of the pool
    assert run_one(driver, 2, first) == 20
    plan = next(plan for plan in driver.worker.plans if plan.page_loads)
    assert len(plan.page_loads) >= 4
    driver.check_outputs()
    assert driver.scheduler.kv.host_tier.num_pinned == 0


def test_neighbours_of_one_step_share_loaded_blocks():
    driver = Driver(tier_config())
    prompt = list(range(16))
    run_one(driver, 0, prompt)
    run_one(driver, 1, range(50, 78))
    for name in (2, 3):
        driver.add(make_request(name, [*prompt, name], max_tokens=2))
    plan = driver.step()
    assert len(plan.starts) == 2
    assert len(plan.page_loads) == 4
    driver.run()
    driver.check_outputs()


def test_nothing_is_saved_of_prompts_that_come_once_when_kv_save_is_reused():
    driver = Driver(tier_config(kv_save="reused"))
    for name in range(6):
        run_one(driver, name, range(name * 100, name * 100 + 28))
    assert not any(plan.page_saves for plan in driver.worker.plans)
    assert len(driver.scheduler.kv.host_tier) == 0


def test_nothing_is_saved_of_what_preemptions_compute_again_when_kv_save_is_reused():
    driver = Driver(tier_config(kv_save="reused"))
    for name in range(4):
        driver.add(make_request(name, range(name * 100, name * 100 + 12), max_tokens=12, ignore_eos=True))
    driver.run()
    run_one(driver, 4, range(400, 428))  # takes all blocks of the pool
    assert driver.scheduler.num_preemptions > 1
    assert not any(plan.page_saves for plan in driver.worker.plans)
    driver.check_outputs()


def test_prompt_that_comes_a_second_time_is_saved_when_kv_save_is_reused():
    driver = Driver(tier_config(kv_save="reused"))
    cached = []
    for name in range(6):
        cached.append(run_one(driver, name, range(name % 2 * 100, name % 2 * 100 + 28)))
    assert cached == [0, 0, 0, 0, 24, 24]
    driver.check_outputs()


def test_tier_is_only_read_when_kv_save_is_none():
    driver = Driver(tier_config(kv_save="none"))
    for name in range(6):
        run_one(driver, name, range(name % 2 * 100, name % 2 * 100 + 28))
    assert not any(plan.page_saves for plan in driver.worker.plans)


def test_prompt_is_saved_at_once_when_it_is_to_be_retained():
    driver = Driver(tier_config(kv_save="reused"))
    run_one(driver, 0, range(22), keep_s=300.0)
    tier = driver.scheduler.kv.host_tier
    assert len(tier) == 5  # the full blocks of the prompt, while the pool still has them
    assert {tier.keep_s(slot) for slot in range(32) if tier.key_of(slot) is not None} == {300.0}
    run_one(driver, 1, range(50, 78))
    assert run_one(driver, 2, range(22)) == 20
    driver.check_outputs()


@pytest.mark.parametrize(("kv_save", "keep_s"), [("reused", 300.0), ("write_through", 0.0)])
def test_state_of_a_prompt_is_saved_at_once_with_its_blocks(kv_save, keep_s):
    driver = Driver(tier_config(kv_save=kv_save, num_state_checkpoints=4, num_state_pages=2, max_num_drafts=0))
    run_one(driver, 0, range(22), keep_s=keep_s)
    tier = driver.scheduler.kv.host_tier
    assert len(tier) == 5 + 2
    assert {tier.keep_s(slot) for slot in range(32) if tier.key_of(slot) is not None} == {keep_s}
    run_one(driver, 1, range(50, 78))
    assert run_one(driver, 2, range(22)) == 20
    driver.check_outputs()


def test_prompt_and_output_are_saved_as_they_are_computed_with_write_through():
    driver = Driver(tier_config(kv_save="write_through"))
    driver.add(make_request(0, range(22), max_tokens=7))
    driver.run()
    tier = driver.scheduler.kv.host_tier
    assert len(tier) == 7  # 28 of 29 tokens, while the pool still has them
    assert sum(len(plan.page_saves) for plan in driver.worker.plans) >= 6  # the last one follows in the next plan
    run_one(driver, 1, range(50, 78))
    assert run_one(driver, 2, range(22)) == 20
    driver.check_outputs()


def test_write_through_saves_later_what_is_too_much_for_one_step():
    driver = Driver(tier_config(kv_save="write_through", max_page_saves=2))
    driver.add(make_request(0, range(22), max_tokens=7))
    driver.run()
    tier = driver.scheduler.kv.host_tier
    assert max(len(plan.page_saves) for plan in driver.worker.plans) == 2
    assert len(tier) >= 6
    assert tier.stats.num_not_saved == 0


def test_retained_pages_are_passed_over_until_the_tier_was_filled_with_others_several_times():
    driver = Driver(tier_config(num_host_pages=8))
    run_one(driver, 0, range(22), keep_s=300.0)
    for name in (1, 2, 3):
        run_one(driver, name, range(name * 100, name * 100 + 28))
    assert run_one(driver, 4, range(22)) == 20
    for name in range(5, 12):
        run_one(driver, name, range(name * 100, name * 100 + 28))
    assert run_one(driver, 12, range(22)) == 0
    driver.check_outputs()


def test_nothing_is_retained_when_kv_save_is_none():
    driver = Driver(tier_config(kv_save="none"))
    run_one(driver, 0, range(22), keep_s=300.0)
    assert len(driver.scheduler.kv.host_tier) == 0


def test_pages_that_are_hit_or_retained_again_are_told_to_the_disk_tier():
    driver = Driver(tier_config())
    tier = driver.scheduler.kv.host_tier
    tier.tracks_uses = True
    run_one(driver, 0, range(22))
    assert tier.take_uses() == {}
    run_one(driver, 1, range(22))  # hits in the pool
    assert list(tier.take_uses().values()) == [0.0] * 5
    run_one(driver, 2, range(50, 78))
    assert tier.take_uses() == {}
    run_one(driver, 3, range(22), keep_s=60.0)
    assert list(tier.take_uses().values()) == [60.0] * 5
    assert tier.take_uses() == {}


def test_step_saves_no_more_than_max_page_saves():
    driver = Driver(tier_config(max_page_saves=2))
    run_one(driver, 0, range(28))
    run_one(driver, 1, range(50, 78))
    assert max(len(plan.page_saves) for plan in driver.worker.plans) == 2
    assert driver.scheduler.kv.host_tier.stats.num_not_saved > 0


def test_prompt_logprobs_are_computed_although_the_tier_has_the_prompt():
    driver = Driver(tier_config())
    prompt = list(range(24))
    run_one(driver, 0, prompt)
    run_one(driver, 1, range(50, 78))
    assert run_one(driver, 2, prompt, prompt_logprobs=1) == 0
    driver.check_outputs()


def test_requests_of_another_salt_find_nothing():
    driver = Driver(tier_config())
    prompt = list(range(24))
    run_one(driver, 0, prompt, salt="one")
    run_one(driver, 1, range(50, 78))
    assert run_one(driver, 2, prompt, salt="two") == 0
    assert run_one(driver, 3, range(50, 78), salt="one") == 0
    assert run_one(driver, 4, prompt, salt="one") == 20


def test_page_is_forgotten_when_the_step_that_saved_it_has_failed():
    driver = Driver(tier_config())
    prompt = list(range(24))
    run_one(driver, 0, prompt)
    driver.add(make_request(1, range(50, 78), max_tokens=2))
    plan = driver.schedule()
    assert plan.page_saves
    fail_step(driver, plan)
    assert driver.outputs["1", 0].reason == "error"
    assert all(driver.scheduler.kv.host_tier.key_of(slot) is None for _, slot in plan.page_saves)
    run_one(driver, 2, prompt)
    driver.check_outputs()


def test_block_is_forgotten_when_the_step_that_loads_it_has_failed():
    driver = Driver(tier_config())
    prompt = list(range(24))
    run_one(driver, 0, prompt)
    run_one(driver, 1, range(50, 78))
    driver.add(make_request(2, prompt, max_tokens=2))
    plan = driver.schedule()
    assert plan.page_loads
    fail_step(driver, plan)
    assert run_one(driver, 3, prompt) == 20  # from the tier again
    assert driver.worker.plans[-2].page_loads
    driver.check_outputs()


def fail_step(driver, plan):
    """Make a whole step fail, so that its copies are unknown."""
    result = driver.worker.execute(plan)
    for _, slot in plan.page_saves:
        driver.worker.pages[slot] = [GARBAGE] * driver.config.block_size
    for _, block_id in plan.page_loads:
        driver.worker.fill(block_id, [GARBAGE] * driver.config.block_size)
    if isinstance(driver.worker, LatePages):
        driver.worker.fail(plan.step_id, result.moved_steps)
    errors = dict.fromkeys(plan.num_scheduled_tokens, "the step failed")
    driver.commit(plan, StepResult(plan.step_id, {}, {}, {}, errors, is_failed=True))


def live(seed, num_events=120, is_late=False, has_states=False):
    """Return a driver that has lived through random events with a host tier and a pretended disk tier, and then drained."""
    rng = random.Random(seed)
    config = replace(
        random_config(rng),
        enable_prefix_caching=True,
        num_host_pages=rng.choice([1, 2, 5, 20, 100]),
        max_page_saves=rng.choice([1, 3, 100]),
        kv_save=rng.choice(["all", "all", "reused"]),
        loads_aside=is_late,
    )
    if has_states:
        config = replace(
            config,
            num_state_checkpoints=rng.choice([0, 1, 2, 5, 30]),
            num_state_pages=rng.choice([1, 2, 3]),
            has_block_pages=rng.random() < 0.7,
            max_num_drafts=4,
            num_host_pages=rng.choice([3, 5, 20, 100]),
            kv_save=rng.choice(["all", "all", "reused", "write_through"]),
        )
    driver = Driver(config, max_sampled=rng.choice([1, 1, 3]), seed=seed, max_drafts=(0, 1, 4)[seed % 3])
    if is_late:
        driver.worker = LatePages(config, driver.worker.max_sampled, seed, driver.worker.max_drafts)
    prefixes = [[rng.randrange(3) for _ in range(rng.randint(0, 24))] for _ in range(4)]
    tier, disk, names = driver.scheduler.kv.host_tier, {}, []

    def read_from_disk(request_id):
        """Hold pages for a request that may be admitted, end, or already have ended."""
        for key in rng.sample(sorted(disk), min(len(disk), 3)):
            for slot in tier.reserve(1):
                if rng.random() < 0.8:
                    driver.worker.pages[slot] = list(disk[key])
                    tier.install(slot, key)
                tier.hold(request_id, [slot])

    def act():
        if rng.random() < 0.4 and sum(1 for _ in driver.scheduler.iter_sequences()) < 24:
            names.append(len(names))
            try:
                driver.add(random_request(rng, names[-1], prefixes))
            except RequestError:
                return
            if rng.random() < 0.5:
                read_from_disk(RequestId(str(names[-1])))
        elif rng.random() < 0.05 and names:
            driver.abort(rng.choice(names[-8:]))

    for _ in range(num_events):
        act()
        plan = driver.schedule()
        if plan is None:
            continue
        if rng.random() < 0.03:
            fail_step(driver, plan)
            continue
        result = driver.worker.execute(plan)
        for slot in tier.saved_slots(result.done_moves):
            disk[tier.key_of(slot)] = list(driver.worker.pages[slot])
        act()
        driver.commit(plan, result)
    driver.run()
    driver.check_outputs()
    while (plan := driver.scheduler.schedule_moves()) is not None:
        driver.commit(plan, driver.worker.execute(plan))
    assert tier.num_pinned == 0
    return driver


lived = functools.cache(live)


@pytest.mark.one_in(3, keep=False)
@pytest.mark.parametrize("seed", seeds(0, 80, num_fast=24))
def test_outputs_equal_isolated_runs_when_events_are_random(seed):
    lived(seed)


def test_sequence_waits_for_its_pages_while_others_are_computed():
    config = tier_config(num_kv_blocks=16, loads_aside=True)
    driver = Driver(config)
    driver.worker = LatePages(config)
    prompt = list(range(24))
    for name, tokens in enumerate((prompt, range(50, 110))):  # the second takes all blocks of the pool
        run_one(driver, name, tokens)
    driver.add(make_request("beside", 3, max_tokens=20))
    driver.step()
    driver.worker.keeps_late = True
    driver.add(make_request("loaded", prompt, max_tokens=2))
    plans = [driver.step() for _ in range(4)]
    assert [len(plan.page_loads) for plan in plans] == [5, 0, 0, 0]
    assert [len(plan.num_scheduled_tokens) for plan in plans] == [1] * 4
    driver.worker.keeps_late = False
    driver.run()
    driver.check_outputs()
    assert driver.outputs["loaded", 0].last.stats.num_cached_tokens == 20
    assert driver.worker.num_waits == 0


@pytest.mark.one_in(4, keep=False)
@pytest.mark.parametrize("seed", seeds(0, 80, num_fast=24))
def test_outputs_equal_isolated_runs_when_pages_are_copied_next_to_steps(seed):
    live(seed, is_late=True)


@pytest.mark.one_in(4, keep=False)
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("seed", seeds(2000, 60, num_fast=12))
def test_sequences_start_from_their_own_states_when_events_are_random(seed, is_late):
    live(seed, 80, is_late, has_states=True)


@pytest.mark.slow
def test_random_events_reach_every_mechanism():
    seen = dict.fromkeys(("saved", "loaded", "not saved", "from disk", "preempted"), 0)
    for seed in range(50):
        driver = lived(seed)
        stats = driver.scheduler.kv.host_tier.stats
        seen["saved"] += stats.num_saved
        seen["loaded"] += stats.num_loaded
        seen["not saved"] += stats.num_not_saved
        seen["from disk"] += stats.num_disk_hits
        seen["preempted"] += driver.scheduler.num_preemptions
    assert all(seen.values()), seen


def test_slot_is_never_taken_while_it_is_pinned():
    tier = HostTier(2, 10, "all")
    assert tier.save(BlockId(0), 100)
    assert tier.save(BlockId(1), 101)
    tier.take_moves(0)
    tier.end_moves(0)
    tier.pin(tier.match([100, 101]))
    for _ in range(2):
        assert not tier.save(BlockId(2), 102)
        assert not tier.save_all([(BlockId(2), 102)])
    assert not tier.retain(102, BlockId(2), 60.0)
    assert tier.stats.num_not_saved == 0  # the pool still has it
    tier.offer(BlockId(2), 102, is_reused=True, is_recomputed=False)
    assert tier.stats.num_not_saved == 1
    tier.unpin(tier.match([100]))
    assert tier.save(BlockId(2), 102)
    assert 101 in tier
    assert 100 not in tier


def test_slot_that_is_unpinned_twice_is_an_error():
    tier = HostTier(2, 10, "all")
    slots = tier.reserve(1)
    tier.unpin(slots)
    with pytest.raises(InvariantError, match="unpinned"):
        tier.unpin(slots)


def test_pages_that_were_found_are_not_replaced_by_those_that_are_read_after_them():
    tier = HostTier(4, 4, "all")
    for key in range(4):
        assert tier.save(BlockId(key), key)
    tier.take_moves(0)
    tier.end_moves(0)
    assert len(tier.match([0, 1, 9])) == 2  # the least recently used, and 9 comes from the disk
    assert len(tier.reserve(2)) == 2
    assert (len(tier.match([0, 1])), 2 in tier, 3 in tier) == (2, False, False)
