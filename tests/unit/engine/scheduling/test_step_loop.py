"""Steps launched ahead: the order of calls, and the same outputs as without, whatever happens meanwhile."""

import functools
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from ahead_fakes import AheadDriver
from random_lives import random_config, random_request, seeds
from reference_model import make_config, make_request

from quire.base.errors import DeviceLostError, RequestError
from quire.base.ids import RequestId
from quire.engine.scheduling import check_invariants


def ask_for_logprobs(request):
    return request.params.needs_logprob


def live(seed, num_events, is_ahead=True, is_calm=False, late_share=0.0, has_tier=False):
    """Return a driver that has lived through num_events random events and then drained; calm: nothing fails or is aborted."""
    rng = random.Random(seed)
    config = random_config(rng)
    if has_tier:
        tier = {"num_host_pages": 1 + seed % 40, "max_page_saves": 1 + seed % 7, "kv_save": "all", "loads_aside": True}
        config = replace(config, enable_prefix_caching=True, **tier)
    samples_on_host = ask_for_logprobs if rng.random() < 0.5 else lambda request: False
    driver = AheadDriver(config, seed=seed, is_ahead=is_ahead, samples_on_host=samples_on_host)
    if late_share:
        lateness = random.Random(seed + 2)
        driver.worker.may_be_late = lambda request: samples_on_host(request) and lateness.random() < late_share
    prefixes = [[rng.randrange(3) for _ in range(rng.randint(0, 24))] for _ in range(3)]
    names: list[int] = []
    add_share = rng.choice([0.1, 0.25, 0.5])
    accidents = random.Random(seed + 1)

    def abort_one():
        if names and accidents.random() < 0.04:
            driver.abort(accidents.choice(names[-8:]))

    if not is_calm:
        driver.worker.between = abort_one  # while one or two steps are in flight
        driver.spoil_some(accidents, rng.choice([0.0, 0.02]))
    for _ in range(num_events):
        if rng.random() < add_share and len(names) < 30:
            names.append(len(names))
            try:
                driver.add(random_request(rng, names[-1], prefixes))
            except RequestError as error:
                assert error.param in ("prompt", "max_tokens")  # noqa: PT017
        driver.step()
    driver.run()
    driver.check_outputs()
    driver.worker.may_be_late = lambda request: False
    flush(driver)
    return driver


def flush(driver):
    """Run one more request, so that the device hears of every end; it must then have no other row."""
    driver.worker.between = lambda: None
    driver.spoil_some(random.Random(0), 0.0)
    driver.add(make_request("flush", 1, max_tokens=1))
    driver.run()
    assert set(driver.worker.rows) == set(driver.worker.plans[-1].num_scheduled_tokens)
    assert driver.outputs[RequestId("flush"), 0].reason is not None


def ends_of(driver):
    return {key: (output.tokens, output.reason, output.stop_reason) for key, output in driver.outputs.items()}


def test_a_step_is_launched_before_the_one_before_is_collected():
    driver = AheadDriver(make_config())
    driver.add(make_request("r", 3, max_tokens=4))
    driver.run()
    assert driver.worker.log == [
        ("launch", 0), ("launch", 1), ("collect", 0), ("launch", 2), ("collect", 1),
        ("launch", 3), ("collect", 2), ("collect", 3),
    ]  # fmt: skip
    driver.check_outputs()


def test_steps_come_one_after_the_other_when_the_runner_runs_none_ahead():
    driver = AheadDriver(make_config(), is_ahead=False)
    driver.add(make_request("r", 3, max_tokens=3))
    driver.run()
    assert driver.worker.log == [(name, step_id) for step_id in range(3) for name in ("launch", "collect")]
    assert not driver.loop.is_ahead
    driver.check_outputs()


def test_a_step_whose_tokens_come_from_the_host_is_collected_first():
    driver = AheadDriver(make_config(), samples_on_host=ask_for_logprobs)
    driver.add(make_request("plain", 3, max_tokens=6))
    driver.step()
    driver.add(make_request("host", 3, max_tokens=2, logprobs=1))
    driver.run()
    assert driver.worker.log[:7] == [
        ("launch", 0), ("launch", 1), ("collect", 0),
        ("launch", 2), ("collect", 1),  # launched after a plain step, with the new request in it
        ("collect", 2), ("launch", 3),
    ]  # fmt: skip
    driver.check_outputs()


def test_one_step_is_left_in_flight_when_the_last_output_has_ended_and_the_next_call_waits_for_it():
    driver = AheadDriver(make_config())
    driver.add(make_request("r", 3))
    driver.step()
    driver.abort("r")
    assert (driver.scheduler.has_unfinished, driver.loop.is_drained) == (False, False)
    driver.step()
    assert driver.loop.is_drained
    assert driver.worker.log[-1] == ("collect", 1)
    assert driver.scheduler.kv_usage == 0.0
    driver.step()  # nothing to do
    assert driver.worker.log[-1] == ("collect", 1)


def test_drain_commits_what_is_in_flight_and_launches_nothing():
    driver = AheadDriver(make_config())
    driver.add(make_request("r", 3, max_tokens=9))
    driver.step()
    driver.loop.drain()
    assert driver.worker.log == [("launch", 0), ("launch", 1), ("collect", 0), ("collect", 1)]
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize("place", ["failing_launches", "failing_collections"])
def test_a_failing_step_ends_its_sequences_and_spares_the_others(place):
    driver = AheadDriver(make_config(max_num_seqs=2))
    for name in range(3):
        driver.add(make_request(name, 6, seed=name, max_tokens=4))
    driver.step()
    fails = iter([True])
    setattr(driver.worker, place, lambda: next(fails, False))
    driver.run()
    driver.check_outputs()
    assert [driver.outputs[str(name), 0].reason for name in range(3)] == ["error", "error", "length"]
    # What was in flight before the launch that failed has brought its tokens.
    assert [len(driver.outputs[str(name), 0].tokens) for name in range(2)] == [2 if place == "failing_launches" else 1] * 2


@pytest.mark.parametrize("place", ["failing_launches", "failing_collections"])
def test_the_loss_of_the_device_is_raised_when_the_books_are_right(place):
    driver = AheadDriver(make_config(max_num_seqs=2))
    for name in range(3):
        driver.add(make_request(name, 6, seed=name, max_tokens=4))
    driver.step()

    def lose():
        raise DeviceLostError("nothing runs there any more")

    setattr(driver.worker, place, lose)
    with pytest.raises(DeviceLostError):
        driver.step()
    check_invariants(driver.scheduler)
    driver.worker.failing_collections = lose
    driver.loop.drain()  # what was launched before is waited for in vain
    assert driver.loop.is_drained
    assert [driver.outputs[str(name), 0].reason for name in range(3)] == ["error", "error", None]
    assert driver.scheduler.kv_usage == 0.0


@pytest.mark.parametrize("place", ["failing_launches", "failing_collections"])
def test_the_books_are_right_when_a_step_is_interrupted(place):
    driver = AheadDriver(make_config(max_num_seqs=2))
    for name in range(3):
        driver.add(make_request(name, 6, seed=name, max_tokens=4))
    driver.step()

    def interrupt():
        raise KeyboardInterrupt

    setattr(driver.worker, place, interrupt)
    with pytest.raises(KeyboardInterrupt):
        driver.step()
    setattr(driver.worker, place, lambda: False)
    for step in driver.worker.queue:
        step.is_broken = step.is_broken or step not in driver.worker.uncollected
    driver.run()
    driver.check_outputs()
    assert [driver.outputs[str(name), 0].reason for name in range(3)] == ["error", "error", "length"]


def test_records_do_not_overlap_and_count_the_tokens_that_each_step_attends_to():
    driver = AheadDriver(make_config())
    driver.loop.is_recording = True
    driver.add(make_request("r", 3, max_tokens=4))
    records = []
    while driver.scheduler.has_unfinished:
        driver.step()
        records.append(driver.loop.last_step)
    assert [record.step_id for record in records] == [0, 1, 2, 3]
    assert [[part.num_tokens for part in record.attended] for record in records] == [[3], [4], [5], [6]]
    assert [[share.is_prefill for share in record.shares] for record in records] == [[True], [False], [False], [False]]
    for before, after in pairwise(records):
        assert after.started_s >= before.started_s + before.duration_s


@functools.cache
def ordinary_life(seed):
    """Return a driver after its life, which several tests look at."""
    return live(seed, num_events=80)


@pytest.mark.one_in(4, keep=False)
@pytest.mark.parametrize("seed", seeds(0, 80, num_fast=40))
def test_outputs_equal_isolated_runs_when_events_are_random(seed):
    ordinary_life(seed)


@pytest.mark.one_in(3, keep=False)
@pytest.mark.parametrize("seed", seeds(500, 40, num_fast=16))
def test_outputs_equal_those_of_steps_one_by_one(seed):
    ahead, one_by_one = (live(seed, num_events=60, is_ahead=is_ahead, is_calm=True) for is_ahead in (True, False))
    assert ends_of(ahead) == ends_of(one_by_one)


@pytest.mark.one_in(3, keep=False)
@pytest.mark.parametrize("seed", seeds(0, 40, num_fast=20))
def test_outputs_equal_isolated_runs_when_sequences_are_late(seed):
    live(seed, num_events=80, late_share=(0.1, 0.6)[seed % 2])


@pytest.mark.one_in(4, keep=False)
@pytest.mark.parametrize("seed", seeds(900, 60, num_fast=20))
def test_outputs_equal_isolated_runs_when_pages_are_copied_next_to_steps(seed):
    driver = live(seed, num_events=80, has_tier=True)
    driver.loop.move_pages()
    assert driver.scheduler.kv.host_tier.num_pinned == 0


@pytest.mark.slow
def test_random_events_reach_every_mechanism():
    seen = dict.fromkeys(("ahead", "refused ahead", "preempted", "copied", "hit", "forked", "chunked", "surplus", "error"), 0)
    for seed in range(40):
        driver = ordinary_life(seed)
        seen["ahead"] += driver.scheduler.num_ahead
        seen["refused ahead"] += driver.scheduler.num_refused_ahead
        seen["preempted"] += driver.scheduler.num_preemptions
        seen["hit"] += driver.scheduler.prefix_cache_hits
        seen["error"] += sum(output.reason == "error" for output in driver.outputs.values())
        num_sampled = 0
        for plan in driver.worker.plans:
            seen["copied"] += len(plan.block_copies)
            seen["chunked"] += sum(num_tokens > 1 for num_tokens in plan.num_scheduled_tokens.values())
            seen["forked"] += sum(start.choice > 0 for start in plan.starts)
            num_sampled += len(plan.num_scheduled_tokens)
        seen["surplus"] += num_sampled > sum(len(output.tokens) for output in driver.outputs.values())
    assert all(seen.values()), seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20_000, 20_002))
def test_outputs_equal_isolated_runs_when_soaked(seed):
    for part in range(10):
        live(seed * 100 + part, num_events=300)
