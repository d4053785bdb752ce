"""The tokens of a step: no padding, right positions and slots."""

from quire.base.ids import BlockId, RequestId, SequenceId
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.contracts.step import SequenceStart, StepPlan
from quire.worker.input_batch import InputBatch


def start(sequence_id, tokens, computed, blocks):
    request = Request(request_id=RequestId(str(sequence_id)), prompt_token_ids=tuple(tokens), params=SamplingParams(), seed=0)
    return SequenceStart(SequenceId(sequence_id), request, 0, tuple(tokens), computed, tuple(map(BlockId, blocks)))


def plan(step_id, scheduled, **changes):
    return StepPlan(step_id, {SequenceId(k): v for k, v in scheduled.items()}, **changes)


def test_step_is_packed_in_batch_order_and_follows_the_changes_of_plans():
    batch = InputBatch(max_num_seqs=4, max_blocks=8, block_size=4, vocab_size=100)
    first = plan(0, {7: 5, 8: 2}, starts=(start(7, [10, 11, 12, 13, 14, 15], 0, [3, 1]), start(8, [20, 21, 22], 1, [5])))
    batch.apply(first)
    step = batch.build(first)
    token_ids, positions, attention = step.runs.tensors(4)
    assert token_ids.tolist() == step.runs.token_ids == [10, 11, 12, 13, 14, 21, 22]
    assert positions.tolist() == [0, 1, 2, 3, 4, 1, 2]
    assert attention.slots.tolist() == [12, 13, 14, 15, 4, 21, 22]
    assert attention.query_starts == step.runs.starts == [0, 5, 7]
    assert attention.context_lens == step.runs.ends == [5, 3]
    assert [row.start.sequence_id for row in step.ready] == [8]
    assert step.logit_rows == [6]
    batch.advance(step)
    step.rows[1].token_ids.append(23)  # what the runner does with a sampled token

    second = plan(
        1,
        {8: 1, 7: 1},
        new_block_ids={SequenceId(8): (BlockId(6),)},
        replaced_blocks={SequenceId(7): ((1, BlockId(2)),)},
    )
    batch.apply(second)
    again = batch.build(second)
    token_ids, positions, attention = again.runs.tensors(4)
    assert token_ids.tolist() == [23, 15]
    assert positions.tolist() == [3, 5]
    assert attention.slots.tolist() == [23, 9]
    assert attention.block_tables.tolist() == [[5, 0], [3, 2]]
    assert [int(table[0]) for table in again.runs.tables] == [5, 3]


def test_sequence_that_ended_can_start_again_with_other_blocks():
    batch = InputBatch(max_num_seqs=1, max_blocks=4, block_size=4, vocab_size=100)
    batch.apply(plan(0, {1: 2}, starts=(start(1, [5, 6], 0, [0]),)))
    again = plan(1, {1: 3}, starts=(start(1, [5, 6, 7], 0, [2]),), ended=(SequenceId(1),))
    batch.apply(again)
    assert batch.build(again).runs.tensors(4)[2].slots.tolist() == [8, 9, 10]
