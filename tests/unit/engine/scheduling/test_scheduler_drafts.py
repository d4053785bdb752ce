"""Slots for drafts: what is left over, never at the cost of a sequence's own tokens."""

from dataclasses import replace

import pytest
from reference_model import make_config, make_request
from scheduling_fakes import Driver


def started(max_drafts=4, requests=1, prompt=5, **options):
    """Return a driver whose requests have all got their first token and wish for max_drafts drafts."""
    driver = Driver(make_config(**options), max_drafts=max_drafts)
    driver.worker.rng.randint = lambda low, high: high  # every wish the largest, every draft right
    for name in range(requests):
        driver.add(make_request(name, prompt, max_tokens=12, seed=name, ignore_eos=True))
    driver.step()
    return driver


def test_a_decoding_sequence_gets_slots_and_keeps_what_is_accepted():
    driver = started()
    (sequence,) = driver.scheduler.running
    assert sequence.num_requested_drafts == 4
    plan = driver.step()
    assert dict(plan.num_scheduled_tokens) == {0: 1}
    assert plan.num_draft_slots == {0: 4}
    assert plan.num_tokens == 5
    assert sequence.num_output_tokens == 6
    assert sequence.num_computed_tokens == sequence.num_tokens - 1
    driver.run()
    driver.check_outputs()


def test_no_slot_reaches_beyond_the_end():
    driver = started(max_drafts=9)
    plans = [driver.step(), driver.step()]
    # 12 tokens: one at first, then 1 + 9, and one is left, behind which nothing may come.
    assert [plan.num_draft_slots for plan in plans] == [{0: 9}, None]
    driver.run()
    driver.check_outputs()


def test_drafts_get_what_the_budget_leaves():
    driver = started(requests=3, max_num_seqs=3, max_num_batched_tokens=16)
    assert driver.schedule().num_draft_slots == {0: 4, 1: 4, 2: 4}
    driver = started(requests=2, max_num_seqs=3, max_num_batched_tokens=11, enable_prefix_caching=False)
    driver.add(make_request("late", 5))
    plan = driver.schedule()
    assert plan.num_scheduled_tokens == {0: 1, 1: 1, 2: 5}
    assert plan.num_draft_slots == {0: 4}


def test_drafts_take_no_block_that_a_sequence_may_need():
    # Two sequences of five tokens hold two blocks of four each; one more is free, and a draft of four would need it.
    driver = started(requests=2, num_kv_blocks=5, prompt=5)
    assert driver.schedule().num_draft_slots is None
    assert started(requests=2, num_kv_blocks=9, prompt=5).schedule().num_draft_slots == {0: 4, 1: 4}


def test_a_preempted_sequence_has_no_wish_left():
    driver = started(requests=2, num_kv_blocks=5, prompt=7)
    while not driver.scheduler.num_preemptions:
        driver.step()
    (waiting,) = driver.scheduler.waiting
    assert waiting.num_preemptions == 1
    assert waiting.num_requested_drafts == 0
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize(
    "verified", [(5, 0), (4, 4), (3, 4)], ids=["more than slots", "without a last token", "more than drafts"]
)
def test_a_sequence_ends_with_an_error_when_the_worker_accepts_what_cannot_be(verified):
    driver = started()
    plan = driver.schedule()
    result = driver.worker.execute(plan)
    few = {sequence_id: tokens[:4] for sequence_id, tokens in result.sampled.items()}
    driver.commit(plan, replace(result, sampled=few, verified=dict.fromkeys(plan.num_scheduled_tokens, verified)))
    (output,) = driver.outputs.values()
    assert output.reason == "error"
    assert "drafts in 4 slots" in output.last.error
