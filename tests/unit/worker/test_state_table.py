"""Which states a sequence can go on from after a step."""

import pytest

from quire.base.errors import InvariantError
from quire.worker.state_table import StateTable, num_state_rows
from quire.worker.step_executor import StateChange, StepTokens

NUM_CHECKPOINTS = 2


def table_of(max_num_drafts=0, num_batch_slots=2, **options):
    num_rows = num_state_rows(num_batch_slots, NUM_CHECKPOINTS, max_num_drafts)
    return StateTable(num_batch_slots, num_rows, NUM_CHECKPOINTS, **options)


def step(table, first, end, num_drafts=0, starts=(), saves=None, batch_slot=1):
    """Place a step of the tokens [first, end) of one sequence; return its source and {position: row}."""
    change = StateChange(starts, {0: saves} if saves else {}, [num_drafts])
    rows = table.place(StepTokens([0] * (end - first), [0, end - first], [end], [batch_slot], [], 0, states=change))
    return rows.sources[0], {first + count: row for count, row in rows.saves[0]}


def test_next_step_starts_from_the_row_of_its_first_position():
    table = table_of()
    source, kept = step(table, 0, 10, starts=[(1, 0, None)])
    assert source == -1
    for position in range(10, 20):
        source, last = step(table, position, position + 1)
        assert source == kept[position]
        assert last[position + 1] != source  # the last token may be computed again
        kept = last


@pytest.mark.parametrize("num_accepted", range(4))
def test_rejected_drafts_leave_the_state_before_them(num_accepted):
    table = table_of(max_num_drafts=3)
    step(table, 0, 10, starts=[(1, 0, None)])
    source, kept = step(table, 10, 14, num_drafts=3)
    assert sorted(kept) == [11, 12, 13, 14]
    assert source not in kept.values()
    position = 11 + num_accepted
    again, _ = step(table, position, position + 4, num_drafts=3)
    assert again == kept[position]


def test_last_known_token_can_be_computed_again_when_a_mask_is_late():
    table = table_of(max_num_drafts=1)
    step(table, 0, 10, starts=[(1, 0, None)])
    source, _ = step(table, 9, 10)  # the prompt's last token
    again, _ = step(table, 9, 11, num_drafts=1)
    assert again == source


def test_state_of_a_checkpoint_is_copied_where_it_may_be_needed_again():
    table = table_of()
    source, kept = step(table, 32, 33, starts=[(1, 32, 1)])
    assert source == 5  # behind the rows of the batch slots
    assert sorted(kept) == [32, 33]  # the checkpoint may have another content in the next step
    again, _ = step(table, 32, 33)
    assert again == kept[32]


def test_copies_of_a_step_that_failed_are_not_made_in_the_next_one():
    table = table_of(copies_starts=True)
    step(table, 32, 33, starts=[(1, 32, 1)])  # fails before its copies are taken
    step(table, 32, 33, starts=[(0, 32, 0)], batch_slot=0)
    assert table.take_copies() == [(4, 0)]


def test_checkpoints_are_written_next_to_own_rows():
    table = table_of()
    _, kept = step(table, 0, 40, starts=[(1, 0, None)], saves=[(32, 0)])
    assert kept[32] == 4
    assert sorted(kept) == [32, 39, 40]


def test_state_that_was_not_kept_is_an_error():
    table = table_of()
    step(table, 0, 10, starts=[(1, 0, None)])
    with pytest.raises(InvariantError, match="no state after 7 tokens"):
        step(table, 7, 8)


def test_trees_are_an_error():
    table = table_of()
    tokens = StepTokens([0], [0, 1], [1], [0], [], 0, trees=object(), states=StateChange([(0, 0, None)], {}, [0]))
    with pytest.raises(InvariantError, match="no branches"):
        table.place(tokens)
