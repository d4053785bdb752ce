from reference_model import make_config, make_request
from scheduling_fakes import Driver

from quire.base.ids import BlockId, SequenceId
from quire.engine.scheduling.kv_allocator import NO_GROWTH, BlockGrowth
from quire.engine.scheduling.step_plan_builder import StepPlanBuilder


def two_sequences():
    driver = Driver(make_config())
    driver.add(make_request("a", 5))
    driver.add(make_request("b", 5))
    return list(driver.scheduler.iter_sequences())


def test_budget_shrinks_by_what_is_added():
    a, b = two_sequences()
    draft = StepPlanBuilder(8)
    assert draft.is_empty
    draft.add(a, 5, NO_GROWTH)
    draft.add(b, 2, NO_GROWTH)
    assert draft.num_tokens_left == 1
    assert tuple(draft.sequences) == (a, b)


def test_removed_sequence_leaves_no_trace():
    a, b = two_sequences()
    a.is_known = b.is_known = True
    growth = BlockGrowth((BlockId(3),), ((0, BlockId(4)),), ((BlockId(0), BlockId(4)),))
    draft = StepPlanBuilder(8)
    draft.add(a, 5, growth)
    draft.add(b, 1, NO_GROWTH)
    draft.remove(a)
    draft.remove(a)  # one that is not in
    assert draft.num_tokens_left == 7
    plan = draft.build(0, ended=(a.sequence_id,))
    assert plan.num_scheduled_tokens == {SequenceId(1): 1}
    assert (plan.starts, plan.new_block_ids, plan.replaced_blocks, plan.block_copies) == ((), None, None, ())


def test_growth_is_told_for_known_sequences_and_is_in_the_table_of_others():
    a, b = two_sequences()
    a.is_known = True
    growth = BlockGrowth((BlockId(3),), ((0, BlockId(4)),), ((BlockId(0), BlockId(4)),))
    draft = StepPlanBuilder(8)
    draft.add(a, 1, growth)
    b.block_ids = [BlockId(5), BlockId(6)]
    draft.add(b, 1, BlockGrowth((BlockId(6),), ((0, BlockId(5)),), ((BlockId(1), BlockId(5)),)))
    plan = draft.build(0, ended=())
    assert plan.new_block_ids == {a.sequence_id: (3,)}
    assert plan.replaced_blocks == {a.sequence_id: ((0, 4),)}
    assert plan.block_copies == ((0, 4), (1, 5))
    assert [start.block_ids for start in plan.starts] == [(5, 6)]
