"""token_logprobs: values, ranks, ties, chunks."""

import math

import pytest
import torch

from quire.sampling import logprobs, token_logprobs

pytestmark = pytest.mark.usefixtures("sampling_path")

V = 40


def random_logits(rows=6, seed=0):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("num_top", [0, 1, 5, V - 1, V, V + 9, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_values_and_ranks_equal_a_plain_computation(num_top, dtype):
    logits, token_ids = random_logits().to(dtype), [0, 39, 7, 7, 12, 20]
    found = token_logprobs(logits, token_ids, num_top)
    for row, (token_id, one) in enumerate(zip(token_ids, found, strict=True)):
        values = torch.log_softmax(logits[row].double(), 0).tolist()
        assert one.token_id == token_id
        assert one.logprob == pytest.approx(values[token_id], abs=1e-5)
        # Ties of bf16 logits are ties of the f32 values too; compare on the logits, which are exact.
        exact = logits[row].double().tolist()
        assert one.rank == 1 + sum(v > exact[token_id] for v in exact)
        best = sorted(range(V), key=lambda i: (-exact[i], i))[: V if num_top < 0 else num_top]
        assert [token for token, _ in one.top] == best
        assert [value for _, value in one.top] == pytest.approx([values[i] for i in best], abs=1e-5)


@pytest.mark.parametrize("num_top", [1, 2, 3, 4, 7, -1])
def test_ties_go_to_the_lowest_id_and_share_a_rank(num_top):
    logits = torch.zeros(1, V)
    logits[0, [30, 4, 9, 22]] = 2.0
    logits[0, 15] = 3.0
    (found,) = token_logprobs(logits, [22], num_top)
    order = [15, 4, 9, 22, 30] + [i for i in range(V) if i not in (4, 9, 15, 22, 30)]
    assert [token for token, _ in found.top] == order[: V if num_top < 0 else num_top]
    assert found.rank == 2


def test_log_probability_of_a_masked_token_is_minus_infinity():
    logits = random_logits(1)
    logits[0, 3] = -math.inf
    (found,) = token_logprobs(logits, [3], 1)
    assert found.logprob == -math.inf
    assert found.rank == V


def test_chunks_do_not_change_the_result(monkeypatch):
    logits, token_ids = random_logits(7), list(range(7))
    expected = token_logprobs(logits, token_ids, 3)
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", 2 * V)
    assert token_logprobs(logits, token_ids, 3) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_unusable_logits_leave_the_other_rows_alone(value):
    logits = random_logits(3)
    logits[1, :] = value
    found = token_logprobs(logits, [1, 2, 3], 2)
    assert math.isnan(found[1].logprob)
    assert [found[0], found[2]] == token_logprobs(logits[[0, 2]], [1, 3], 2)


def test_no_rows_give_no_log_probabilities():
    assert token_logprobs(torch.zeros(0, V), [], 5) == []


def test_logits_are_not_changed():
    logits = random_logits()
    copy = logits.clone()
    token_logprobs(logits, [0] * 6, 5)
    assert torch.equal(logits, copy)
