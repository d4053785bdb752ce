"""The tensors of a step: no padding, right positions and slots, buffers reused."""

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
    batch = InputBatch(max_num_seqs=4, max_num_tokens=32, max_blocks=8, block_size=4, vocab_size=100)
    first = plan(0, {7: 5, 8: 2}, starts=(start(7, [10, 11, 12, 13, 14, 15], 0, [3, 1]), start(8, [20, 21, 22], 1, [5])))
    batch.apply(first)
    step = batch.build(first)
    assert step.token_ids.tolist() == [10, 11, 12, 13, 14, 21, 22]
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 1, 2]
    assert step.attention.slots.tolist() == [12, 13, 14, 15, 4, 21, 22]
    assert step.attention.query_starts == [0, 5, 7]
    assert step.attention.context_lens == [5, 3]
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
    assert again.token_ids.tolist() == [23, 15]
    assert again.positions.tolist() == [3, 5]
    assert again.attention.slots.tolist() == [23, 9]
    assert again.attention.block_tables[:, :2].tolist() == [[5, 6], [3, 2]]
    assert again.token_ids.data_ptr() == step.token_ids.data_ptr()


def test_sequence_that_ended_can_start_again_with_other_blocks():
    batch = InputBatch(max_num_seqs=1, max_num_tokens=8, max_blocks=4, block_size=4, vocab_size=100)
    batch.apply(plan(0, {1: 2}, starts=(start(1, [5, 6], 0, [0]),)))
    again = plan(1, {1: 3}, starts=(start(1, [5, 6, 7], 0, [2]),), ended=(SequenceId(1),))
    batch.apply(again)
    assert batch.build(again).attention.slots.tolist() == [8, 9, 10]
