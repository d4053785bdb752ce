"""Requests in the background run in what the others leave, and give it back when others come."""

import pytest
from ahead_fakes import CheckedScheduler
from reference_model import make_config, make_request
from scheduling_fakes import Driver

from quire.base.ids import RequestId, SequenceId
from quire.contracts.step import StepResult


def background(name, prompt=3, **options):
    return make_request(name, prompt, background=True, **options)


def started(plan):
    return [start.request.request_id for start in plan.starts]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_takes_the_seat_of_the_newest_in_the_background(policy):
    driver = Driver(make_config(max_num_seqs=2, policy=policy))
    driver.add(background("old", max_tokens=20))
    driver.add(background("new", max_tokens=20))
    for _ in range(4):
        driver.step()
    driver.add(make_request("online", 5, max_tokens=2))
    assert started(driver.step()) == ["online"]
    assert [s.request.request_id for s in driver.scheduler.running] == ["online", "old"]
    driver.step()
    assert started(driver.step()) == ["new"]
    driver.run()
    driver.check_outputs()
    assert driver.scheduler.num_preemptions == 1


def test_all_seats_in_the_background_are_taken_when_as_many_requests_come():
    driver = Driver(make_config(max_num_seqs=3))
    for name in "abc":
        driver.add(background(name, max_tokens=20))
    driver.step()
    for name in "def":
        driver.add(make_request(name, 4, max_tokens=3))
    assert started(driver.step()) == ["d", "e", "f"]
    driver.run()
    driver.check_outputs()


def test_a_request_takes_blocks_of_the_background():
    driver = Driver(make_config(num_kv_blocks=6, block_size=4, max_model_len=24, enable_prefix_caching=False))
    driver.add(background("a", range(200, 208), max_tokens=8))
    driver.add(background("b", range(300, 308), max_tokens=8))
    driver.step()
    driver.add(make_request("online", range(400, 412), max_tokens=2))
    assert started(driver.step()) == ["online"]
    driver.run()
    driver.check_outputs()


def test_nobody_is_preempted_when_only_the_background_waits():
    driver = Driver(make_config(max_num_seqs=1))
    driver.add(make_request("online", 3, max_tokens=8))
    driver.add(background("a", max_tokens=8))
    driver.run()
    driver.add(background("b", max_tokens=8))
    driver.step()
    driver.add(background("c", max_tokens=8))
    driver.run()
    driver.check_outputs()
    assert driver.scheduler.num_preemptions == 0


def test_requests_never_give_way_to_one_another():
    driver = Driver(make_config(max_num_seqs=1))
    driver.add(make_request("first", 3, max_tokens=8))
    driver.step()
    driver.add(make_request("second", 3, max_tokens=1))
    driver.run()
    assert driver.scheduler.num_preemptions == 0


def test_a_prompt_goes_before_a_long_one_in_the_background():
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(background("long", range(200, 240), max_tokens=1))
    driver.step()
    driver.add(make_request("online", 6, max_tokens=1))
    plan = driver.step()
    assert list(plan.num_scheduled_tokens.items()) == [(SequenceId(1), 6), (SequenceId(0), 2)]
    driver.run()
    driver.check_outputs()


def test_who_waits_in_the_background_starts_behind_everybody():
    driver = Driver(make_config(max_num_seqs=1))
    driver.add(make_request("running", 3, max_tokens=3))
    driver.step()
    driver.add(background("early", arrival=0.0, max_tokens=1))
    driver.add(make_request("late", 3, arrival=9.0, max_tokens=1))
    order = []
    while (plan := driver.step()) is not None:
        order += started(plan)
    assert order == ["late", "early"]


def test_nothing_is_planned_ahead_when_somebody_in_the_background_has_to_give_way():
    scheduler = CheckedScheduler(make_config(max_num_seqs=1))
    scheduler.add(background("a"))
    first = scheduler.schedule()
    scheduler.add(make_request("online", 3))
    assert scheduler.schedule_ahead() is None
    scheduler.commit(first, StepResult(first.step_id, {SequenceId(0): (1,)}, {}, {}, {}))
    assert scheduler.schedule().num_scheduled_tokens == {SequenceId(1): 3}
    assert scheduler.schedule_ahead() is not None
    assert scheduler.abort(RequestId("online"))
