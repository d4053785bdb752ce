import pytest
from reference_model import make_config, make_request
from scheduling_fakes import Driver

from quire.base.ids import RequestId, SequenceId
from quire.contracts.step import StepResult
from quire.engine.scheduling.sequence import SequenceStatus


def statuses(driver):
    return [sequence.status for sequence in driver.scheduler.iter_sequences()]


def test_choices_are_held_until_the_prompt_is_computed():
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_request("r", 12, n=3, max_tokens=3))
    driver.step()
    assert statuses(driver) == [SequenceStatus.RUNNING] + [SequenceStatus.HELD] * 2
    driver.step()
    assert statuses(driver) == [SequenceStatus.RUNNING] * 3
    driver.run()
    driver.check_outputs()


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("num_prompt", [1, 5, 8, 9], ids=lambda n: f"prompt{n}")
@pytest.mark.parametrize("is_caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("max_tokens", [1, 6])
def test_forked_choices_give_the_tokens_of_isolated_runs(num_prompt, is_caching, max_tokens):
    driver = Driver(make_config(block_size=4, enable_prefix_caching=is_caching))
    driver.add(make_request("r", num_prompt, n=4, max_tokens=max_tokens))
    driver.run()
    driver.check_outputs()


def test_followers_share_the_prompt_and_compute_its_last_token():
    driver = Driver(make_config(block_size=4))
    driver.add(make_request("r", 10, n=3, max_tokens=4))
    driver.step()
    plan = driver.step()
    assert [start.num_computed_tokens for start in plan.starts] == [9, 9]
    assert [start.block_ids[:2] for start in plan.starts] == [(0, 1)] * 2
    # Block 2 has three holders: the first two that write take copies, the last one keeps it.
    assert plan.block_copies == ((2, 3), (2, 4))
    assert plan.replaced_blocks == {SequenceId(0): ((2, 3),)}
    assert [start.block_ids[2] for start in plan.starts] == [4, 2]
    driver.run()
    driver.check_outputs()


def test_nothing_is_copied_when_the_write_begins_the_block():
    driver = Driver(make_config(block_size=4))
    driver.add(make_request("r", 9, n=2, max_tokens=4))
    driver.step()
    plan = driver.step()
    (start,) = plan.starts
    assert plan.replaced_blocks == {SequenceId(0): ((2, 3),)}
    assert plan.block_copies == ((2, 3),)  # choice 0 keeps position 8; the follower writes it and has block 2 alone
    driver.run()
    driver = Driver(make_config(block_size=1))
    driver.add(make_request("r", 3, n=2, max_tokens=4))
    driver.step()
    plan = driver.step()
    (start,) = plan.starts
    assert (plan.block_copies, len(start.block_ids)) == ((), 3)
    assert start.block_ids[2] != 2
    driver.run()
    driver.check_outputs()


def test_published_block_is_not_written_when_only_the_follower_holds_it():
    driver = Driver(make_config(block_size=4))
    driver.add(make_request("r", 8, n=2, max_tokens=1))  # choice 0 ends at once
    driver.step()
    (start,) = driver.step().starts
    assert start.block_ids[0] == 0
    assert start.block_ids[1] != 1
    driver.check_outputs()


def test_followers_wait_like_others_when_there_is_no_seat():
    driver = Driver(make_config(max_num_seqs=1, block_size=4))
    driver.add(make_request("r", 9, n=3, max_tokens=3))
    driver.step()
    assert statuses(driver) == [SequenceStatus.RUNNING] + [SequenceStatus.WAITING] * 2
    starts = [start for plan in iter(driver.step, None) for start in plan.starts]
    assert [start.num_computed_tokens for start in starts] == [8, 8]
    driver.check_outputs()


def test_followers_wait_like_others_when_there_is_no_block_to_spare():
    driver = Driver(make_config(block_size=4, num_kv_blocks=4))
    driver.add(make_request("r", 12, n=3, max_tokens=2))
    driver.step()
    assert statuses(driver) == [SequenceStatus.RUNNING] * 2 + [SequenceStatus.WAITING]
    driver.run()
    driver.check_outputs()


def test_followers_wait_like_others_when_choice_0_fails_in_the_prompt():
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_request("r", 12, n=3, max_tokens=2))
    plan = driver.schedule()
    driver.worker.execute(plan)
    driver.commit(plan, StepResult(plan.step_id, {}, {}, {}, {SequenceId(0): "failed"}))
    assert statuses(driver) == [SequenceStatus.WAITING] * 2
    driver.run()
    driver.check_outputs()
    assert [driver.outputs[RequestId("r"), choice].reason for choice in range(3)] == ["error", "length", "length"]


def test_followers_stay_held_when_choice_0_is_preempted_in_the_prompt():
    driver = Driver(make_config(block_size=2, num_kv_blocks=8, max_num_batched_tokens=4, max_num_seqs=3))
    driver.add(make_request("old", range(100, 104), max_tokens=6))
    driver.add(make_request("r", range(200, 209), n=2, max_tokens=2))
    while driver.scheduler.num_preemptions == 0:
        assert driver.step() is not None
    assert statuses(driver) == [SequenceStatus.RUNNING, SequenceStatus.WAITING, SequenceStatus.HELD]
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3], ids=["waiting", "in the prompt", "forked", "decoding"])
def test_abort_ends_every_choice_once(num_steps):
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_request("r", 12, n=3, max_tokens=8))
    for _ in range(num_steps):
        driver.step()
    updates = driver.abort("r")
    assert [(update.choice, update.finish_reason) for update in updates] == [(0, "abort"), (1, "abort"), (2, "abort")]
    driver.check_outputs()
    driver.flush()


def test_best_of_makes_as_many_sequences():
    driver = Driver(make_config())
    driver.add(make_request("r", 4, n=2, best_of=4, max_tokens=2))
    assert sum(1 for _ in driver.scheduler.iter_sequences()) == 4
    driver.run()
    driver.check_outputs()


def test_prompt_is_hashed_once_for_all_choices(monkeypatch):
    from quire.engine.scheduling import kv_allocator

    num_calls = 0
    real = kv_allocator.block_key

    def counting(parent_key, token_ids):
        nonlocal num_calls
        num_calls += 1
        return real(parent_key, token_ids)

    monkeypatch.setattr(kv_allocator, "block_key", counting)
    driver = Driver(make_config(block_size=4))
    driver.add(make_request("r", 16, n=4, max_tokens=3))
    driver.run()
    assert num_calls == 4
