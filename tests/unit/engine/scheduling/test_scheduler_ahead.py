"""Plans that are made while a step runs, and their correction when a sequence turns out to have ended in it."""

import pytest
from ahead_fakes import CheckedScheduler
from reference_model import make_config, make_request

from quire.base.errors import InvariantError
from quire.base.ids import RequestId, SequenceId
from quire.contracts.step import StepResult
from quire.engine.scheduling import check_invariants

EOS = 7


def make_scheduler(*requests, **options):
    scheduler = CheckedScheduler(make_config(**options))
    for request in requests:
        scheduler.add(request)
    return scheduler


def commit(scheduler, plan, sampled=None, **errors):
    """Commit a plan with a token for each of `sampled`: sequence -> token, or tokens."""
    tokens = {SequenceId(key): value if isinstance(value, tuple) else (value,) for key, value in (sampled or {}).items()}
    updates = scheduler.commit(plan, StepResult(plan.step_id, tokens, {}, {}, {int(k[1:]): v for k, v in errors.items()}))
    check_invariants(scheduler)
    return updates


def test_every_sequence_that_gets_a_token_computes_it_in_the_step_ahead_and_gains_the_block_for_it():
    scheduler = make_scheduler(make_request("a", 4), make_request("b", 2), block_size=4)
    first = scheduler.schedule()
    assert first.num_scheduled_tokens == {0: 4, 1: 2}
    ahead = scheduler.schedule_ahead()
    assert ahead.num_scheduled_tokens == {0: 1, 1: 1}
    assert ahead.starts == ()
    assert set(ahead.new_block_ids) == {0}
    assert [u.new_token_ids for u in commit(scheduler, first, {0: 1, 1: 2})] == [(1,), (2,)]
    assert [u.new_token_ids for u in commit(scheduler, ahead, {0: 3, 1: 4})] == [(3,), (4,)]
    assert scheduler.sequence(SequenceId(0)).token_ids[-2:] == [1, 3]


def test_the_rest_of_a_prompt_goes_on_ahead():
    scheduler = make_scheduler(make_request("a", 10), max_num_batched_tokens=8, max_num_seqs=1, max_model_len=32)
    first = scheduler.schedule()
    ahead = scheduler.schedule_ahead()
    assert (first.num_scheduled_tokens, ahead.num_scheduled_tokens) == ({0: 8}, {0: 2})
    assert commit(scheduler, first) == []
    third = scheduler.schedule_ahead()
    assert third.num_scheduled_tokens == {0: 1}


@pytest.mark.parametrize("options", [{"max_tokens": 1}, {"pooling": "last"}])
def test_a_sequence_that_ends_with_the_step_in_flight_is_not_in_the_next(options):
    scheduler = make_scheduler(make_request("a", 3, **options), make_request("b", 3))
    scheduler.schedule()
    assert scheduler.schedule_ahead().num_scheduled_tokens == {1: 1}


def test_nothing_is_planned_ahead_when_everything_ends_with_the_step_in_flight():
    scheduler = make_scheduler(make_request("a", 3, max_tokens=1))
    plan = scheduler.schedule()
    assert scheduler.schedule_ahead() is None
    assert [u.finish_reason for u in commit(scheduler, plan, {0: 5})] == ["length"]
    assert scheduler.schedule() is None


def test_new_requests_are_admitted_ahead():
    scheduler = make_scheduler(make_request("a", 3))
    scheduler.schedule()
    scheduler.add(make_request("b", 5))
    ahead = scheduler.schedule_ahead()
    assert ahead.num_scheduled_tokens == {0: 1, 1: 5}
    assert [start.sequence_id for start in ahead.starts] == [1]


def test_a_token_behind_the_end_is_passed_over_and_its_blocks_are_kept_until_its_step_is_committed():
    scheduler = make_scheduler(make_request("a", 4, eos={EOS}), block_size=4)
    first = scheduler.schedule()
    ahead = scheduler.schedule_ahead()
    (end,) = commit(scheduler, first, {0: EOS})
    assert (end.finish_reason, end.new_token_ids) == ("stop", (EOS,))
    assert not scheduler.has_unfinished
    assert scheduler.kv.pool.num_free == 30  # both blocks may still be written
    assert len(scheduler.kv.index) == 1
    assert commit(scheduler, ahead, {0: 9}) == []
    assert scheduler.kv.pool.num_free == 32
    assert [entry.content.token_ids for _, _, entry in scheduler.kv.index.iter_entries()] == [(100, 101, 102, 103)]


def test_nothing_of_a_discarded_token_is_published_when_it_fills_a_block():
    scheduler = make_scheduler(make_request("a", 3, eos={EOS}), block_size=4)
    first = scheduler.schedule()
    ahead = scheduler.schedule_ahead()  # computes position 3, the end of block 0
    commit(scheduler, first, {0: EOS})
    commit(scheduler, ahead, {0: 9})
    assert len(scheduler.kv.index) == 0


def test_an_abort_with_two_steps_in_flight_ends_once_and_frees_the_blocks_with_the_second():
    scheduler = make_scheduler(make_request("a", 3), make_request("b", 3))
    first, ahead = scheduler.schedule(), scheduler.schedule_ahead()
    (end,) = scheduler.abort(RequestId("a"))
    assert end.finish_reason == "abort"
    assert scheduler.kv.pool.num_free == 30
    assert [u.sequence_id for u in commit(scheduler, first, {0: 1, 1: 1})] == [1]
    assert scheduler.kv.pool.num_free == 30
    third = scheduler.schedule_ahead()
    assert (third.ended, third.num_scheduled_tokens) == ((0,), {1: 1})
    assert [u.sequence_id for u in commit(scheduler, ahead, {0: 1, 1: 1})] == [1]
    assert scheduler.kv.pool.num_free == 30  # that of "a" is free; "b" has taken its second one
    assert scheduler.abort(RequestId("a")) == []


def test_a_stop_found_in_the_text_ends_a_sequence_that_is_in_flight():
    scheduler = make_scheduler(make_request("a", 3))
    first, ahead = scheduler.schedule(), scheduler.schedule_ahead()
    commit(scheduler, first, {0: 1})
    assert scheduler.finish(SequenceId(0), "stop", "stop!").finish_reason == "stop"
    check_invariants(scheduler)
    assert commit(scheduler, ahead, {0: 1}) == []
    assert scheduler.kv_usage == 0.0


def test_an_error_ends_a_sequence_that_is_in_the_next_step_already():
    scheduler = make_scheduler(make_request("a", 3), make_request("b", 3))
    first, ahead = scheduler.schedule(), scheduler.schedule_ahead()
    ends = commit(scheduler, first, {1: 1}, s0="logits are not finite")
    assert [(u.sequence_id, u.error) for u in ends] == [(0, "logits are not finite"), (1, None)]
    assert [u.sequence_id for u in commit(scheduler, ahead, {0: 1, 1: 1})] == [1]


def test_several_tokens_are_an_error_when_the_next_step_was_planned_for_one():
    scheduler = make_scheduler(make_request("a", 3), make_request("b", 3, max_tokens=1))
    first = scheduler.schedule()
    ahead = scheduler.schedule_ahead()
    errors = [u.error for u in commit(scheduler, first, {0: (1, 2), 1: (1, 2)})]
    assert "several tokens" in errors[0]
    assert errors[1] is None
    commit(scheduler, ahead, {0: 1})
    assert scheduler.kv_usage == 0.0


def test_nothing_is_planned_ahead_when_somebody_would_be_preempted():
    scheduler = make_scheduler(make_request("a", 4), make_request("b", 4), block_size=4, num_kv_blocks=3, max_model_len=8)
    first = scheduler.schedule()
    assert first.num_scheduled_tokens == {0: 4, 1: 4}
    assert scheduler.schedule_ahead() is None
    assert scheduler.num_preemptions == 0
    commit(scheduler, first, {0: 1, 1: 1})
    assert scheduler.schedule().num_scheduled_tokens == {0: 1}
    assert scheduler.num_preemptions == 1


def test_choices_are_forked_before_choice_0_writes_behind_the_prompt():
    scheduler = make_scheduler(make_request("a", 3, n=2), make_request("b", 3), block_size=4)
    first = scheduler.schedule()
    ahead = scheduler.schedule_ahead()
    assert ahead.num_scheduled_tokens == {2: 1}
    commit(scheduler, first, {0: 1, 2: 1})
    assert scheduler.sequence(SequenceId(0)).block_ids == scheduler.sequence(SequenceId(1)).block_ids
    third = scheduler.schedule_ahead()
    assert third.num_scheduled_tokens == {0: 1, 1: 1, 2: 1}
    assert len(third.block_copies) == 1
    commit(scheduler, ahead, {2: 1})


def test_drafts_get_no_slots_ahead():
    scheduler = make_scheduler(make_request("a", 3))
    plan = scheduler.schedule()
    scheduler.commit(plan, StepResult(plan.step_id, {SequenceId(0): (1,)}, {}, {}, {}, draft_requests={SequenceId(0): 3}))
    assert scheduler.schedule().num_draft_slots == {0: 3}
    assert scheduler.schedule_ahead().num_draft_slots is None


def test_a_step_ahead_follows_exactly_one_step_in_flight():
    scheduler = make_scheduler(make_request("a", 3))
    with pytest.raises(InvariantError, match="0 steps are in flight"):
        scheduler.schedule_ahead()
    first, ahead = scheduler.schedule(), scheduler.schedule_ahead()
    with pytest.raises(InvariantError, match="2 steps are in flight"):
        scheduler.schedule_ahead()
    with pytest.raises(InvariantError, match="not those in flight"):
        commit(scheduler, ahead, {0: 1})
    commit(scheduler, first, {0: 1})
    with pytest.raises(InvariantError, match="step 1 must be committed"):
        scheduler.schedule()


def test_states_are_saved_where_the_steps_end_that_are_planned_ahead():
    scheduler = make_scheduler(make_request("a", 6, max_tokens=8), block_size=4, num_state_checkpoints=8, max_num_drafts=0)
    plan, ends, saved = scheduler.schedule(), 0, []
    while plan is not None:
        ends += plan.num_scheduled_tokens[0]
        positions = [position for position, _ in (plan.state_saves or {}).get(0, ())]
        assert all(ends - plan.num_scheduled_tokens[0] < position <= ends for position in positions)
        saved += positions
        behind = scheduler.schedule_ahead()
        commit(scheduler, plan, {0: 9})
        plan = behind
    assert saved == [4, 8, 12]
    assert scheduler.kv.states.num_cached == 2  # the prompt's, and the last of the output
