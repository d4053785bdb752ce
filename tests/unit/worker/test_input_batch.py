"""The tokens of a step: no padding, right positions and slots."""

import numpy as np
import pytest

from quire.base.ids import BlockId, RequestId, SequenceId
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.contracts.step import SequenceStart, StepPlan
from quire.model.token_runs import TokenRuns
from quire.worker.input_batch import InputBatch


def start(sequence_id, tokens, computed, blocks):
    request = Request(request_id=RequestId(str(sequence_id)), prompt_token_ids=tuple(tokens), params=SamplingParams(), seed=0)
    return SequenceStart(SequenceId(sequence_id), request, 0, tuple(tokens), computed, tuple(map(BlockId, blocks)))


def plan(step_id, scheduled, **changes):
    return StepPlan(step_id, {SequenceId(k): v for k, v in scheduled.items()}, **changes)


def tensors_of(step, tables):
    """Return the token ids, positions and attention inputs of a step."""
    token_ids, starts, ends, batch_slots, *_ = step.tokens
    return TokenRuns(token_ids, starts, ends, [tables[slot] for slot in batch_slots], []).tensors(4)


def test_step_is_packed_in_batch_order_and_follows_the_changes_of_plans():
    tables = np.zeros((4, 8), np.int64)
    batch = InputBatch(tables, block_size=4, vocab_size=100)
    first = plan(0, {7: 5, 8: 2}, starts=(start(7, [10, 11, 12, 13, 14, 15], 0, [3, 1]), start(8, [20, 21, 22], 1, [5])))
    assert list(batch.apply(first)) == [(0, 0, (3, 1)), (1, 0, (5,))]
    step = batch.build(first)
    token_ids, positions, attention = tensors_of(step, tables)
    assert token_ids.tolist() == step.tokens.token_ids == [10, 11, 12, 13, 14, 21, 22]
    assert positions.tolist() == [0, 1, 2, 3, 4, 1, 2]
    assert attention.slots.tolist() == [12, 13, 14, 15, 4, 21, 22]
    assert attention.query_starts == step.tokens.starts == [0, 5, 7]
    assert attention.context_lens == step.tokens.ends == [5, 3]
    assert [row.start.sequence_id for row in step.ready] == [8]
    assert step.tokens.logit_rows == [6]
    batch.advance(step)
    step.rows[1].token_ids.append(23)  # what the runner does with a sampled token

    second = plan(
        1,
        {8: 1, 7: 1},
        new_block_ids={SequenceId(8): (BlockId(6),)},
        replaced_blocks={SequenceId(7): ((1, BlockId(2)),)},
    )
    assert list(batch.apply(second)) == [(1, 1, (6,)), (0, 1, (2,))]
    again = batch.build(second)
    token_ids, positions, attention = tensors_of(again, tables)
    assert token_ids.tolist() == [23, 15]
    assert positions.tolist() == [3, 5]
    assert attention.slots.tolist() == [23, 9]
    assert attention.block_tables.tolist() == [[5, 0], [3, 2]]
    assert [int(tables[slot, 0]) for slot in again.tokens.batch_slots] == [5, 3]


def test_sequence_that_ended_can_start_again_with_other_blocks():
    tables = np.zeros((1, 4), np.int64)
    batch = InputBatch(tables, block_size=4, vocab_size=100)
    batch.apply(plan(0, {1: 2}, starts=(start(1, [5, 6], 0, [0]),)))
    again = plan(1, {1: 3}, starts=(start(1, [5, 6, 7], 0, [2]),), ended=(SequenceId(1),))
    batch.apply(again)
    assert tensors_of(batch.build(again), tables)[2].slots.tolist() == [8, 9, 10]


def test_nothing_changes_in_the_tables_when_a_plan_only_goes_on():
    batch = InputBatch(np.zeros((1, 4), np.int64), block_size=4, vocab_size=100)
    batch.apply(plan(0, {1: 2}, starts=(start(1, [5, 6, 7], 0, [0]),)))
    assert len(batch.apply(plan(1, {1: 1}))) == 0


@pytest.mark.parametrize(
    ("params", "without_sampler", "with_sampler"),
    [
        (SamplingParams(temperature=0.0), (), ()),
        (SamplingParams(temperature=0.8, top_k=5), [0], ()),
        (SamplingParams(temperature=0.8, typical_p=0.5), [0], [0]),
        (SamplingParams(temperature=0.0, logprobs=1), [0], [0]),
        (SamplingParams(temperature=0.8, repetition_penalty=1.3), [0], [0]),
    ],
    ids=["greedy", "drawn", "typical", "logprobs", "penalty"],
)
def test_the_driver_samples_what_the_executor_cannot(params, without_sampler, with_sampler):
    for has_sampler, expected in ((False, without_sampler), (True, with_sampler)):
        batch = InputBatch(np.zeros((1, 4), np.int64), 4, 100, has_sampler)
        request = Request(request_id=RequestId("a"), prompt_token_ids=(5, 6), params=params, seed=0)
        batch.apply(plan(0, {1: 2}, starts=(SequenceStart(SequenceId(1), request, 0, (5, 6), 0, (BlockId(0),)),)))
        assert list(batch.host_sampled([batch.row(SequenceId(1))])) == list(expected)
        batch.apply(plan(1, {}, ended=(SequenceId(1),)))
        assert list(batch.host_sampled([])) == []
