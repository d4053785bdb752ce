"""The rules of a step: budget, chunks, order, seats, admission, plans, updates."""

import pytest
from reference_model import STOP_STRING, make_config, make_request
from scheduling_fakes import Driver

from quire.base.errors import InvariantError
from quire.base.ids import RequestId, SequenceId
from quire.contracts.step import StepResult


def counts(plan):
    return list(plan.num_scheduled_tokens.values())


def result_of(plan, sampled):
    return StepResult(plan.step_id, sampled, {}, {}, {})


def test_schedule_returns_none_when_nothing_is_unfinished():
    driver = Driver(make_config())
    assert driver.scheduler.schedule() is None
    driver.add(make_request("r", 3, max_tokens=1))
    driver.run()
    assert driver.scheduler.schedule() is None


def test_long_prompt_is_cut_into_chunks_of_the_budget():
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_request("r", 20, max_tokens=2))
    assert [counts(driver.step()) for _ in range(4)] == [[8], [8], [4], [1]]
    driver.check_outputs()


def test_decode_never_waits_behind_prompts():
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_request("decoding", 4, max_tokens=10))
    driver.step()
    driver.add(make_request("long", range(200, 230), max_tokens=2))
    driver.add(make_request("next", range(300, 310), max_tokens=2))
    assert [counts(driver.step()) for _ in range(5)] == [[1, 7], [1, 7], [1, 7], [1, 7], [1, 2, 5]]


def test_decode_never_waits_behind_a_prompt_of_higher_priority():
    driver = Driver(make_config(max_num_batched_tokens=8, policy="priority"))
    driver.add(make_request("decoding", 4, max_tokens=10, priority=5))
    driver.step()
    driver.add(make_request("urgent", range(200, 230), max_tokens=2, priority=-5))
    assert [driver.step().num_scheduled_tokens for _ in range(3)] == [{SequenceId(0): 1, SequenceId(1): 7}] * 3


def test_threshold_caps_the_chunk_of_each_sequence():
    driver = Driver(make_config(max_num_batched_tokens=16, long_prefill_token_threshold=5))
    driver.add(make_request("a", range(200, 212), max_tokens=1))
    driver.add(make_request("b", range(300, 303), max_tokens=1))
    driver.add(make_request("c", range(400, 412), max_tokens=1))
    assert [counts(driver.step()) for _ in range(3)] == [[5, 3, 5], [5, 5], [2, 2]]


def test_seats_limit_running_sequences():
    driver = Driver(make_config(max_num_seqs=2))
    for name in range(4):
        driver.add(make_request(name, range(100 * name, 100 * name + 3), max_tokens=3))
    driver.step()
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (2, 2)
    driver.run()
    driver.check_outputs()


def test_admission_needs_blocks_for_the_whole_prompt():
    driver = Driver(make_config(num_kv_blocks=5, block_size=4, max_num_batched_tokens=8))
    driver.add(make_request("small", 8, max_tokens=4))
    driver.add(make_request("large", range(200, 216), max_tokens=1))  # 4 blocks; 3 are free
    assert counts(driver.step()) == [8]
    assert driver.scheduler.num_waiting == 1


def test_waiting_head_that_does_not_fit_blocks_those_behind_it():
    driver = Driver(make_config(num_kv_blocks=5, block_size=4))
    driver.add(make_request("running", 8, max_tokens=3))
    driver.step()
    driver.add(make_request("large", range(200, 216), max_tokens=1))
    driver.add(make_request("small", range(300, 302), max_tokens=1))
    order = []
    while (plan := driver.step()) is not None:
        order += [start.request.request_id for start in plan.starts]
    assert order == ["large", "small"]


def test_earlier_arrival_time_goes_first_when_added_later():
    driver = Driver(make_config(max_num_seqs=1))
    driver.add(make_request("late", 3, arrival=2.0))
    driver.add(make_request("early", 3, arrival=1.0))
    plan = driver.step()
    assert [start.request.request_id for start in plan.starts] == ["early"]


def test_plan_tells_only_what_changed():
    driver = Driver(make_config(block_size=4))
    driver.add(make_request("r", 7, max_tokens=4))
    first, second, third, fourth = (driver.step() for _ in range(4))
    (start,) = first.starts
    assert (start.token_ids, start.num_computed_tokens, start.block_ids) == (tuple(range(100, 107)), 0, (0, 1))
    assert first.new_block_ids is None
    assert (second.starts, second.new_block_ids) == ((), None)  # position 7 is in block 1
    assert third.new_block_ids == {start.sequence_id: (2,)}
    assert fourth.new_block_ids is None
    assert driver.step() is None


def test_worker_hears_of_an_end_with_the_next_plan_and_only_if_it_knew():
    driver = Driver(make_config())
    driver.add(make_request("known", 3, max_tokens=1))
    driver.step()
    driver.add(make_request("unknown", 3))
    driver.abort("unknown")
    assert driver.step() is None
    driver.add(make_request("next", 3, max_tokens=1))
    assert driver.step().ended == (SequenceId(0),)


def test_sequence_aborted_while_its_plan_is_in_flight_is_passed_over():
    driver = Driver(make_config())
    driver.add(make_request("a", 3))
    driver.add(make_request("b", 3))
    plan = driver.schedule()
    result = driver.worker.execute(plan)
    (update,) = driver.abort("a")
    assert (update.finish_reason, update.choice) == ("abort", 0)
    driver.commit(plan, result)
    assert driver.outputs[RequestId("a"), 0].tokens == []
    assert len(driver.outputs[RequestId("b"), 0].tokens) == 1
    assert driver.step().ended == (SequenceId(0),)


def test_abort_returns_nothing_when_the_id_is_unknown_or_ended():
    driver = Driver(make_config())
    driver.add(make_request("r", 3, max_tokens=1))
    assert driver.abort("other") == []
    driver.run()
    assert driver.abort("r") == []


def test_finish_ends_a_sequence_once():
    driver = Driver(make_config())
    driver.add(make_request("r", 3))
    driver.step()
    update = driver.scheduler.finish(SequenceId(0), "stop", STOP_STRING)
    assert update is not None
    assert (update.finish_reason, update.stop_reason) == ("stop", STOP_STRING)
    assert driver.scheduler.finish(SequenceId(0), "stop") is None
    assert not driver.scheduler.has_unfinished
    assert driver.scheduler.kv_usage == 0.0


def test_update_of_the_end_carries_the_statistics():
    driver = Driver(make_config(max_num_seqs=1, block_size=4))
    driver.now = 1.0
    driver.add(make_request("a", 8, max_tokens=2))
    driver.add(make_request("b", 9, max_tokens=2))
    driver.run()
    stats = driver.outputs[RequestId("b"), 0].last.stats
    assert (stats.added_s, stats.first_scheduled_s, stats.first_token_s) == (1.0, 3.0, 4.0)
    assert (stats.num_cached_tokens, stats.num_preemptions) == (8, 0)
    assert (driver.scheduler.prefix_cache_queries, driver.scheduler.prefix_cache_hits) == (17, 8)


def test_waiting_sequence_aborted_has_never_been_scheduled():
    driver = Driver(make_config())
    driver.add(make_request("r", 3))
    (update,) = driver.abort("r")
    assert update.stats.first_scheduled_s is None
    assert update.stats.first_token_s is None


def test_middle_of_a_prompt_makes_no_update():
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_request("r", 12))
    plan = driver.schedule()
    assert driver.scheduler.commit(plan, driver.worker.execute(plan)) == []


@pytest.mark.parametrize("prompt, sampled, text", [(3, False, "no token where one"), (12, True, "a token where none")])
def test_sequence_ends_with_error_when_the_worker_breaks_the_contract(prompt, sampled, text):
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_request("r", prompt))
    plan = driver.schedule()
    (update,) = driver.scheduler.commit(plan, result_of(plan, {SequenceId(0): (5,)} if sampled else {}))
    assert update.finish_reason == "error"
    assert text in update.error
    assert not driver.scheduler.has_unfinished


def test_error_of_one_sequence_leaves_the_others():
    driver = Driver(make_config())
    driver.add(make_request("a", 3, max_tokens=3))
    driver.add(make_request("b", 3, max_tokens=3))
    plan = driver.schedule()
    result = driver.worker.execute(plan)
    del result.sampled[SequenceId(0)]
    result.errors[SequenceId(0)] = "logits are not finite"
    driver.commit(plan, result)
    assert driver.outputs[RequestId("a"), 0].last.error == "logits are not finite"
    driver.run()
    driver.check_outputs()
    assert driver.outputs[RequestId("b"), 0].reason == "length"


def test_blocks_of_a_failed_chunk_are_not_published():
    driver = Driver(make_config(block_size=4))
    driver.add(make_request("r", 9))
    plan = driver.schedule()
    driver.commit(plan, StepResult(plan.step_id, {}, {}, {}, {SequenceId(0): "failed"}))
    assert len(driver.scheduler.kv.index) == 0


def test_schedule_raises_when_a_plan_is_in_flight():
    driver = Driver(make_config())
    driver.add(make_request("r", 3))
    driver.schedule()
    with pytest.raises(InvariantError, match="step 0"):
        driver.scheduler.schedule()


def test_commit_raises_when_the_plan_is_not_the_one_in_flight():
    driver = Driver(make_config())
    driver.add(make_request("r", 3))
    plan = driver.step()
    with pytest.raises(InvariantError, match="not those in flight"):
        driver.scheduler.commit(plan, result_of(plan, {}))
