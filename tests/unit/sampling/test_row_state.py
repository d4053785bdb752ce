"""SamplingRow: seeds, positions, counts, and the same state however it came about."""

import pytest
import torch
from row_factory import PROMPT, make_request, make_row

from quire.base.errors import InvariantError
from quire.base.seeds import mix_seed
from quire.sampling import SamplingRow
from quire.sampling.row_state import TokenCounts

PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.1}


def counted(counts):
    return dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))


def test_seed_is_mixed_from_request_and_choice():
    assert make_row(10, seed=5, choice=3).seed == mix_seed(5, 3)
    assert make_row(10, seed=5, choice=3).seed != make_row(10, seed=5, choice=2).seed


def test_position_counts_the_known_tokens():
    row = make_row(10)
    assert row.position == len(PROMPT)
    row.append(2)
    assert (row.position, row.num_output_tokens, row.output_token_ids) == (len(PROMPT) + 1, 1, [2])


def test_plain_row_keeps_no_counts_and_edits_nothing():
    row = make_row(10, top_k=5, top_p=0.5, min_p=0.1, stop_token_ids=[3], eos=[1])
    assert row.known_counts is None
    assert row.output_counts is None
    assert not row.edits_logits


@pytest.mark.parametrize("num_before", [0, 1, 5, 40])
def test_resumed_row_equals_the_one_that_grew(num_before):
    output = torch.randint(0, 10, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    request = make_request(**PENALTIES)
    grown = SamplingRow(request, 1, request.prompt_token_ids + tuple(output[:num_before]), 10)
    for token_id in output[num_before:]:
        grown.append(token_id)
    resumed = SamplingRow(request, 1, request.prompt_token_ids + tuple(output), 10)
    assert grown.output_token_ids == resumed.output_token_ids == output
    assert (grown.position, grown.seed) == (resumed.position, resumed.seed)
    assert counted(grown.known_counts) == counted(resumed.known_counts)
    assert counted(grown.output_counts) == counted(resumed.output_counts)
    assert counted(grown.output_counts) == {token: output.count(token) for token in set(output)}


def test_rows_of_a_request_do_not_share_state():
    request = make_request(n=2, **PENALTIES)
    rows = [SamplingRow(request, choice, request.prompt_token_ids, 10) for choice in range(2)]
    rows[0].append(9)
    assert counted(rows[0].output_counts) == {9: 1}
    assert counted(rows[1].output_counts) == {}


def test_tokens_outside_the_vocabulary_are_left_out():
    row = make_row(
        6,
        allowed_token_ids=[1, 99, 10**30],
        logit_bias={2: 1.0, 77: 5.0},
        min_tokens=2,
        eos=[3, 88],
        stop_token_ids=[10**20],
        **PENALTIES,
    )
    row.append(1000)
    assert row.allowed_ids.tolist() == [1]
    assert row.bias_ids.tolist() == [2]
    assert row.forbidden_ids() == [3]
    assert row.position == len(PROMPT) + 1


def test_row_without_its_whole_prompt_is_refused():
    with pytest.raises(InvariantError, match="5 tokens, got 4"):
        SamplingRow(make_request(), 0, PROMPT[:-1], 10)


def test_token_counts_grow_past_their_room():
    counts = TokenCounts([5, 5, 2])
    for token_id in [*range(100), 5]:
        counts.add(token_id)
    assert counted(counts) == {i: 1 + 3 * (i == 5) + (i == 2) for i in range(100)}
