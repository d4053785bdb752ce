from reference_model import make_config, make_request
from scheduling_fakes import Driver

from quire.base.ids import RequestId, SequenceId


def started(plan):
    return [start.request.request_id for start in plan.starts]


def test_youngest_gives_way_and_resumes_with_its_output_when_blocks_run_out():
    driver = Driver(make_config(block_size=2, num_kv_blocks=6, enable_prefix_caching=False))
    driver.add(make_request("old", range(100, 104), max_tokens=6))
    driver.add(make_request("young", range(200, 204), max_tokens=4))
    driver.step()  # 2 blocks each
    driver.step()  # 3 blocks each
    driver.step()
    plan = driver.step()  # "old" needs a fourth
    assert list(plan.num_scheduled_tokens) == [SequenceId(0)]
    assert plan.ended == (SequenceId(1),)
    assert [s.request.request_id for s in driver.scheduler.waiting] == ["young"]
    later = next(p for p in iter(driver.step, None) if p.starts)
    (start,) = later.starts
    assert (start.num_computed_tokens, len(start.token_ids)) == (0, 7)
    driver.run()
    driver.check_outputs()
    assert driver.outputs[RequestId("young"), 0].last.stats.num_preemptions == driver.scheduler.num_preemptions == 1


def test_sequence_that_asks_is_its_own_victim_when_it_is_the_youngest():
    driver = Driver(make_config(block_size=2, num_kv_blocks=5))
    driver.add(make_request("old", range(100, 105), max_tokens=4))  # 3 blocks, with room for one more token
    driver.add(make_request("young", range(200, 204), max_tokens=4))  # 2 blocks, full
    driver.step()
    plan = driver.step()
    assert list(plan.num_scheduled_tokens) == [SequenceId(0)]
    assert plan.ended == (SequenceId(1),)
    driver.run()
    driver.check_outputs()


def test_victim_has_the_highest_value_then_is_the_youngest_under_priority():
    driver = Driver(make_config(block_size=2, num_kv_blocks=6, policy="priority"))
    driver.add(make_request("low", range(100, 104), max_tokens=4, priority=5))
    driver.add(make_request("high", range(200, 204), max_tokens=4, priority=-5))
    driver.add(make_request("lower", range(300, 304), max_tokens=4, priority=5))
    driver.step()
    plan = driver.step()
    assert plan.ended == (SequenceId(2),)
    assert set(plan.num_scheduled_tokens) == {SequenceId(0), SequenceId(1)}
    driver.run()
    driver.check_outputs()


def test_preempted_sequences_wait_in_front_in_their_order():
    driver = Driver(make_config(block_size=2, num_kv_blocks=6, max_num_seqs=3, enable_prefix_caching=False))
    for name in range(3):
        driver.add(make_request(name, range(100 * name, 100 * name + 4), max_tokens=8))
    driver.add(make_request("behind", range(400, 402), max_tokens=1))
    driver.step()
    for _ in range(4):
        driver.step()
    waiting = [s.request.request_id for s in driver.scheduler.waiting]
    assert waiting == ["1", "2", "behind"]
    driver.run()
    driver.check_outputs()


def test_nobody_is_admitted_in_the_step_of_a_preemption():
    driver = Driver(make_config(block_size=2, num_kv_blocks=6))
    driver.add(make_request("old", range(100, 104), max_tokens=6))
    driver.add(make_request("young", range(200, 208), max_tokens=1, n=1))
    driver.scheduler.abort(RequestId("young"))
    driver.add(make_request("large", range(300, 308), max_tokens=2))
    driver.step()
    driver.add(make_request("small", range(400, 401), max_tokens=1))
    plan = driver.step()
    assert plan.ended == (SequenceId(2),)
    assert not plan.starts
    driver.outputs[RequestId("young"), 0].reason = "abort"
    driver.run()
    driver.check_outputs()


def test_resumed_sequence_finds_its_own_blocks_in_the_cache():
    driver = Driver(make_config(block_size=2, num_kv_blocks=7))
    driver.add(make_request("old", range(100, 106), max_tokens=3))
    driver.add(make_request("young", range(200, 206), max_tokens=4))
    starts = [start for plan in iter(driver.step, None) for start in plan.starts]
    assert [start.request.request_id for start in starts] == ["old", "young", "young"]
    assert starts[-1].num_computed_tokens == 6
    assert driver.outputs[RequestId("young"), 0].last.stats.num_cached_tokens == 0
    driver.check_outputs()


def test_sequence_leaves_the_plan_it_was_in_when_it_is_preempted():
    """Only several tokens per step can do that: one with two uncomputed tokens asks after the decoding ones are placed."""
    driver = Driver(make_config(block_size=2, num_kv_blocks=4, max_num_seqs=4, max_num_batched_tokens=4))
    driver.add(make_request("old", range(100, 104), max_tokens=4))
    driver.step()
    driver.add(make_request("young", range(200, 201), max_tokens=3))
    plan = driver.schedule()
    result = driver.worker.execute(plan)
    driver.worker.rows[SequenceId(0)].tokens.append(7)
    result.sampled[SequenceId(0)] += (7,)  # the second token needs a block, and "young" holds the last
    driver.scheduler.commit(plan, result)
    plan = driver.schedule()
    assert plan.num_scheduled_tokens == {SequenceId(0): 2}
    assert plan.ended == (SequenceId(1),)


def test_each_choice_can_finish_alone_when_the_pool_holds_just_one():
    driver = Driver(make_config(block_size=2, num_kv_blocks=5, max_num_seqs=4))
    driver.add(make_request("r", 4, n=4, max_tokens=7))  # 10 tokens of KV: the whole pool, for each of four
    driver.run()
    driver.check_outputs()
    assert driver.scheduler.num_preemptions > 0


def test_prompt_log_probabilities_are_handed_out_once_when_preempted_in_the_prompt():
    driver = Driver(make_config(block_size=2, num_kv_blocks=7, max_num_batched_tokens=4, max_num_seqs=2))
    driver.add(make_request("old", range(100, 104), max_tokens=8))
    driver.add(make_request("young", range(200, 208), max_tokens=2, prompt_logprobs=1))
    driver.run()
    driver.check_outputs()
    assert driver.outputs[RequestId("young"), 0].last.stats.num_preemptions >= 1
