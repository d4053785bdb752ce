"""The arrays of a step, against a plain loop over its tokens, and their padding."""

import numpy as np
import pytest

from quire.base.errors import InvariantError
from quire.base.ids import RequestId, SequenceId
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.contracts.step import SequenceStart, StepPlan
from quire.speculate.draft import Draft
from quire.worker.device.host_step import fill, fill_decode_slots, fill_places, fill_sampled, full_step, host_step
from quire.worker.input_batch import InputBatch
from quire.worker.step_executor import UNKNOWN

BLOCK_SIZE = 4


def start(number, prompt, num_computed, blocks):
    request = Request(request_id=RequestId(str(number)), prompt_token_ids=tuple(prompt), params=SamplingParams(), seed=7)
    return SequenceStart(SequenceId(number), request, 0, tuple(prompt), num_computed, blocks)


def arrays(num_tokens, num_sequences, num_sampled):
    """What a step is written into, full of what must not stay."""
    of_tokens = ("given_ids", "token_rows", "positions", "slots")
    counts = dict.fromkeys(of_tokens, num_tokens) | {"rows": num_sequences, "context_lens": num_sequences}
    counts |= dict.fromkeys(("logit_rows", "sampled_rows", "sample_positions"), num_sampled)
    return {name: np.full(count, -99) for name, count in {**counts, "query_starts": num_sequences + 1}.items()}


def arrays_of(batch, step):
    return host_step(step.tokens, batch.block_tables, BLOCK_SIZE)


@pytest.fixture
def batch():
    batch = InputBatch(np.zeros((4, 5), np.int64), BLOCK_SIZE, 100)
    batch.apply(
        StepPlan(0, {}, (start(0, range(10, 19), 0, (3, 1, 4)), start(1, range(30, 33), 0, (2,)), start(2, [40, 41], 0, (0,))))
    )
    return batch


def test_tokens_stand_where_the_tables_say_when_chunks_and_whole_prompts_are_mixed(batch):
    plan = StepPlan(1, {SequenceId(0): 5, SequenceId(1): 3, SequenceId(2): 1})
    step = arrays_of(batch, batch.build(plan))
    assert step.counts == (5, 3, 1)
    assert step.given_ids.tolist() == [10, 11, 12, 13, 14, 30, 31, 32, 40]
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0]
    assert step.slots.tolist() == [12, 13, 14, 15, 4, 8, 9, 10, 0]
    assert step.context_lens.tolist() == [5, 3, 1]
    assert step.logit_rows.tolist() == [7]  # the others' known tokens are not all computed
    assert step.sample_positions.tolist() == [3]
    assert step.rows.tolist() == [batch.row(SequenceId(n)).batch_slot for n in range(3)]
    assert step.sampled_rows.tolist() == [step.rows[1]]
    assert not step.is_decode


def test_only_the_last_token_comes_from_the_device_when_the_host_does_not_know_it(batch):
    row = batch.row(SequenceId(2))
    row.num_computed_tokens = 1
    row.token_ids[1] = UNKNOWN
    plan = StepPlan(1, {SequenceId(1): 3, SequenceId(2): 1})
    step = arrays_of(batch, batch.build(plan))
    assert step.given_ids.tolist() == [30, 31, 32, -1]


def test_padding_sees_and_stores_nothing(batch):
    for number in (1, 2):
        batch.row(SequenceId(number)).num_computed_tokens = len(batch.row(SequenceId(number)).token_ids) - 1
    step = arrays_of(batch, batch.build(StepPlan(1, {SequenceId(1): 1, SequenceId(2): 1})))
    assert step.is_decode
    wide = arrays(4, 4, 4)
    fill_decode_slots(wide, step, padding_row=4)
    fill_places(wide, step)
    assert wide["context_lens"].tolist() == [3, 2, 0, 0]
    assert wide["slots"].tolist() == [10, 1, -1, -1]
    assert wide["given_ids"].tolist() == [32, 41, 0, 0]
    assert wide["rows"].tolist() == wide["sampled_rows"].tolist() == wide["token_rows"].tolist() == [*step.rows, 4, 4]
    assert wide["logit_rows"].tolist() == [0, 1, 2, 3]
    assert wide["query_starts"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(InvariantError, match="cannot be padded"):
        fill_decode_slots(arrays(1, 1, 1), step, padding_row=4)


def test_the_arrays_of_a_step_with_prompts_are_its_own(batch):
    step = arrays_of(batch, batch.build(StepPlan(1, {SequenceId(0): 5, SequenceId(1): 3, SequenceId(2): 1})))
    found = arrays(9, 3, 1)
    fill(found, step, padding_row=4)
    fill_sampled(found, step)
    for name in ("rows", "context_lens", "given_ids", "positions", "slots", "logit_rows", "sampled_rows", "sample_positions"):
        assert found[name].tolist() == getattr(step, name).tolist()
    assert found["token_rows"].tolist() == np.repeat(step.rows, step.counts).tolist()
    assert found["query_starts"].tolist() == [0, 5, 8, 9]


def test_further_tokens_of_a_step_with_prompts_are_one_sequence_behind_the_others(batch):
    plan = StepPlan(1, {SequenceId(0): 5, SequenceId(1): 3})
    step = arrays_of(batch, batch.build(plan))
    found = arrays(12, 5, 1)
    fill(found, step, padding_row=4)
    assert found["query_starts"].tolist() == [0, 5, 8, 8, 8, 12]
    assert found["context_lens"].tolist() == [5, 3, 0, 0, 0]
    assert found["rows"].tolist() == [*step.rows, 4, 4, 4]
    assert found["token_rows"].tolist() == [*np.repeat(step.rows, step.counts), 4, 4, 4, 4]
    assert found["slots"].tolist() == [*step.slots, -1, -1, -1, -1]
    assert found["given_ids"].tolist() == [*step.given_ids, 0, 0, 0, 0]


def test_a_full_step_has_the_asked_size_and_stores_nothing():
    step = full_step(100, 7, 128, 9)
    assert (sum(step.counts), len(step.counts)) == (100, 7)
    assert step.counts[0] == 94
    assert full_step(100, 7, 128, 9, num_short=4).counts == (76, *(4,) * 6)
    assert full_step(20, 7, 64, 9, num_short=4).counts == (2, *(3,) * 6)
    assert full_step(7, 7, 64, 9, num_short=4).counts == (1,) * 7
    assert set(step.slots.tolist()) == {-1}
    assert step.logit_rows.tolist() == [93, 94, 95, 96, 97, 98, 99]
    assert step.context_lens.tolist() == [94, 1, 1, 1, 1, 1, 128]
    assert full_step(9, 1, 64, 9).context_lens.tolist() == [64]


@pytest.mark.parametrize(
    ("num_tokens", "num_sequences", "context_len", "num_short", "counts"),
    [
        (100, 7, 64, 1, (64, 31, 1, 1, 1, 1, 1)),
        (100, 7, 64, 4, (64, 16, 4, 4, 4, 4, 4)),
        (200, 7, 64, 1, (64, 64, 64, 5, 1, 1, 1)),
        (100, 2, 64, 16, (64, 36)),
        (8192, 3, 10, 4, (10, 10, 10)),
        (9, 1, 4, 1, (4,)),
        (20, 4, 3, 16, (3, 3, 3, 3)),
        (3, 7, 64, 1, (1, 1, 1)),
    ],
)
def test_no_sequence_of_a_full_step_is_longer_than_its_block_table(num_tokens, num_sequences, context_len, num_short, counts):
    """It has as many tokens all the same, as far as so many sequences have them."""
    step = full_step(num_tokens, num_sequences, context_len, 9, num_short, num_drafts=5)
    assert step.counts == counts
    assert step.context_lens.tolist() == [*counts[:-1], context_len]
    assert len(step.given_ids) == len(step.slots) == min(num_tokens, num_sequences * context_len)
    assert (step.context_lens >= counts).all()
    assert step.num_drafts == min(5, sum(counts) - len(counts))


TREE = Draft((50, 51, 52), (-1, 0, -1))


def test_drafts_stand_behind_the_last_known_token_and_have_their_lines_and_the_positions_of_their_depths(batch):
    for number in (1, 2):
        row = batch.row(SequenceId(number))
        row.num_computed_tokens, row.token_ids[-1] = len(row.token_ids) - 1, UNKNOWN
    batch.apply(StepPlan(1, {}, new_block_ids={SequenceId(2): (5,)}))
    lines = [batch.row(SequenceId(number)).batch_slot for number in range(3)]
    plan = StepPlan(2, {SequenceId(1): 1, SequenceId(2): 1}, num_draft_slots={SequenceId(2): 3})
    step = arrays_of(batch, batch.build(plan, {SequenceId(2): TREE}))
    assert step.counts == (1, 4)
    assert step.given_ids.tolist() == [-1, -1, 50, 51, 52]
    assert step.positions.tolist() == [2, 1, 2, 3, 2]
    assert step.slots.tolist() == [10, 1, 2, 3, 20]
    assert step.context_lens.tolist() == [3, 5]
    assert step.logit_rows.tolist() == [0, 1, 2, 3, 4]
    assert step.sampled_rows.tolist() == [lines[1], *[lines[2]] * 4]
    assert step.sample_positions.tolist() == [3, 2, 3, 4, 3]
    assert step.num_drafts == 3
    assert not step.is_decode
    wide = arrays(7, 3, 5) | {"num_drafts": np.full(3, -99), "ancestors": np.full(7, -99), "tree_positions": np.full(7, -99)}
    fill(wide, step, padding_row=4)
    assert wide["num_drafts"].tolist() == [0, 3, 0]
    assert wide["ancestors"].tolist() == [0, 0, 1, 3, 4, 0, 0]
    assert wide["tree_positions"].tolist() == [2, 1, 2, 3, 2, 0, 0]


def test_chains_of_drafts_are_tokens_like_others(batch):
    batch.row(SequenceId(1)).num_computed_tokens = 2
    plan = StepPlan(1, {SequenceId(1): 1}, num_draft_slots={SequenceId(1): 1})
    step = arrays_of(batch, batch.build(plan, {SequenceId(1): Draft.chain((9,))}))
    assert step.trees is None
    assert step.positions.tolist() == [2, 3]
    assert step.sample_positions.tolist() == [3, 4]


def test_full_steps_have_as_many_drafts_as_are_asked_for_and_there_is_room_for():
    step = full_step(9, 3, 64, 9, num_short=2, num_drafts=4)
    assert step.counts == (5, 2, 2)
    assert step.logit_rows.tolist() == [4, 6, 8, 0, 1, 2, 3]
    assert len(step.sampled_rows) == len(step.sample_positions) == 7
    assert full_step(9, 3, 64, 9, num_drafts=40).num_drafts == 6
