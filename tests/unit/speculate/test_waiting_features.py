"""What a head keeps of the model's features until it drafts: of the right places, and no more than it says."""

from types import SimpleNamespace

import head_checkpoints as heads
import numpy as np
import pytest
import torch

from quire.contracts.kv_spec import KvSpec
from quire.kv.pool import KvPool
from quire.model.config_reader import read_model_spec
from quire.model.heads.build import read_layer_head
from quire.speculate.features import join
from quire.speculate.head_proposer import MAX_PENDING, HeadProposer


@pytest.fixture
def make(tiny_model, tmp_path):
    head = read_layer_head(heads.eagle3(tmp_path / "head"), "eagle3", read_model_spec(tiny_model))

    def proposer(block_size):
        return HeadProposer(None, head, KvPool(KvSpec.of(head.body, block_size, "float32"), 8192 // block_size), 8192)

    return proposer


def known(length, memo=None):
    return SimpleNamespace(table=np.arange(8192 // 16), memo=memo, token_ids=[0] * (length + 1))


@pytest.mark.covering
@pytest.mark.parametrize("block_size", [16, 256, 272, 512, 1024])
@pytest.mark.parametrize("chunks", [[1000], [512, 1, *[1] * 600], [700, 324, *[3] * 400], [255] * 12], ids=len)
def test_the_last_places_wait_from_the_start_of_a_block_on_when_the_oldest_are_forgotten(make, block_size, chunks):
    proposer, end = make(block_size), 0
    sequence = known(0)
    for count in chunks:
        places = torch.arange(end, end + count, dtype=torch.float32)
        end += count
        sequence.token_ids = [0] * (end + 1)
        proposer.on_hidden_states([(sequence, end - count, count)], places[:, None])
        memo = sequence.memo
        rows = join(memo.waiting)[:, 0].tolist()
        assert rows == list(range(memo.done, end))
        assert memo.num_waiting == len(rows) <= max(2 * MAX_PENDING, block_size)
        assert memo.start == memo.done
        assert memo.start % block_size == 0
        assert proposer.num_available(sequence, 3) == 3


def test_no_more_is_held_than_what_waits_and_one_step_when_others_compute_prompts(make):
    proposer, sequence = make(16), known(0)
    for place in range(400):
        step = torch.full((256, 8), float(place))
        sequence.token_ids = [0] * (place + 2)
        proposer.on_hidden_states([(sequence, place, 1), (known(255), 0, 255)], step)
    waiting = sequence.memo.waiting
    held = {run.features.untyped_storage().data_ptr(): run.features.untyped_storage().nbytes() for run in waiting}
    assert join(waiting)[:, 0].tolist() == list(range(400))
    assert sum(held.values()) <= 4 * 8 * (256 + 2 * 400)


def test_nothing_waits_of_a_sequence_that_is_too_long_to_be_drafted_for(make):
    proposer, sequence = make(16), known(8189)
    proposer.on_hidden_states([(sequence, 8180, 9)], torch.ones(9, 8))
    assert proposer.num_available(sequence, 3) == 2
    for length in (8191, 8192, 9000):
        sequence.token_ids = [0] * (length + 1)
        proposer.on_hidden_states([(sequence, length - 1, 1)], torch.ones(1, 8))
        assert sequence.memo is None
        assert proposer.num_available(sequence, 3) == 0
    sequence.token_ids = [0] * 41  # whatever it is that made it shorter
    proposer.on_hidden_states([(sequence, 0, 40)], torch.arange(40.0)[:, None])
    assert join(sequence.memo.waiting)[:, 0].tolist() == list(range(40))
    assert proposer.num_available(sequence, 3) == 3


def test_one_row_is_held_when_it_stands_for_places_that_nobody_read(make):
    proposer, sequence = make(16), known(40)
    proposer.on_hidden_states([(sequence, 40, 1), (known(255), 0, 255)], torch.ones(256, 8))
    nearest, _ = sequence.memo.waiting
    assert (sequence.memo.done, nearest.count) == (32, 8)
    assert nearest.features.untyped_storage().nbytes() == 4 * 8
