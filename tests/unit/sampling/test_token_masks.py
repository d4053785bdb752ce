"""Masked rows: both paths of the sampler against sampling where the forbidden logits are -inf."""

import pytest
import torch

from quire.sampling.sampler import sample
from tests.unit.sampling.row_factory import make_row

KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 1.0, "typical_p": 0.8},
    {"temperature": 0.9, "repetition_penalty": 1.3, "logit_bias": {3: 5.0, 4: -5.0}, "presence_penalty": 0.5},
    {"temperature": 1.0, "min_tokens": 3, "eos": [7]},
]


def random_mask(generator, vocab_size, share):
    bits = torch.rand(vocab_size, generator=generator) < share
    bits[torch.randint(vocab_size, (1,), generator=generator)] = True
    return bits


def pack(bits, num_spare_words=0):
    words = torch.zeros((len(bits) + 31) // 32 + num_spare_words, dtype=torch.int64)
    for token_id in bits.nonzero()[:, 0].tolist():
        words[token_id // 32] |= 1 << (token_id % 32)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("vocab_size", [1, 33, 64, 1000, 4097])
@pytest.mark.parametrize("share", [0.002, 0.5, 1.0])
def test_token_is_that_of_logits_without_the_forbidden_ones(sampling_path, vocab_size, share):
    generator = torch.Generator().manual_seed(vocab_size + int(1000 * share))
    logits = torch.randn(len(KINDS), vocab_size, generator=generator) * 3
    rows, oracle = [], []
    masked_logits = logits.clone()
    for index, kind in enumerate(KINDS):
        bits = random_mask(generator, vocab_size, share)
        bits[0] = True
        row = make_row(vocab_size, seed=index, **kind)
        row.token_mask = pack(bits, num_spare_words=index % 2)
        rows.append(row)
        oracle.append(make_row(vocab_size, seed=index, **kind))
        masked_logits[index, ~bits] = float("-inf")
    before = logits.clone()
    found = sample(logits, rows)
    assert [one.token_id for one in found] == [one.token_id for one in sample(masked_logits, oracle)]
    assert all(one.error is None for one in found)
    assert torch.equal(logits, before)


def test_token_is_the_first_that_would_be_drawn_again_and_again_until_one_is_allowed(sampling_path):
    """The law: the masked draw is the best of logit + noise among the allowed tokens, so the noise does not change."""
    vocab_size = 50
    generator = torch.Generator().manual_seed(5)
    for seed in range(40):
        logits = torch.randn(1, vocab_size, generator=generator)
        bits = random_mask(generator, vocab_size, 0.3)
        row = make_row(vocab_size, seed=seed)
        row.token_mask = pack(bits)
        (found,) = sample(logits, [row])
        left = set(range(vocab_size))
        while True:  # reject, and draw again without what was rejected
            (drawn,) = sample(logits, [make_row(vocab_size, seed=seed, allowed_token_ids=sorted(left))])
            if bits[drawn.token_id]:
                break
            left.remove(drawn.token_id)
        assert found.token_id == drawn.token_id


@pytest.mark.parametrize("kind", [{}, {"temperature": 0.0}, {"typical_p": 0.5}, {"logit_bias": {1: 1.0}}])
def test_row_says_that_the_constraint_leaves_nothing_when_the_mask_is_empty(sampling_path, kind):
    row = make_row(100, **kind)
    row.token_mask = pack(torch.zeros(100, dtype=torch.bool))
    (found,) = sample(torch.randn(1, 100), [row])
    assert found.token_id is None
    assert "constraint" in found.error


def test_row_says_so_when_min_tokens_takes_the_last_token_that_the_constraint_leaves(sampling_path):
    bits = torch.zeros(100, dtype=torch.bool)
    bits[42] = True
    row = make_row(100, min_tokens=1, eos=[42])
    row.token_mask = pack(bits)
    (found,) = sample(torch.randn(1, 100), [row])
    assert found.token_id is None
    assert "constraint" in found.error
    assert "min_tokens" in found.error


def test_nan_is_reported_when_it_stands_at_a_forbidden_token(sampling_path):
    bits = torch.ones(100, dtype=torch.bool)
    bits[3] = False
    logits = torch.randn(1, 100)
    logits[0, 3] = float("nan")
    row = make_row(100)
    row.token_mask = pack(bits)
    (found,) = sample(logits, [row])
    assert "NaN" in found.error


def test_log_probabilities_are_of_the_raw_logits_when_a_mask_is_set(sampling_path):
    logits = torch.randn(1, 100)
    bits = torch.zeros(100, dtype=torch.bool)
    bits[int(logits[0].argmin())] = True
    row = make_row(100, logprobs=3)
    row.token_mask = pack(bits)
    (found,) = sample(logits, [row])
    assert found.logprobs.rank == 100
    assert [token_id for token_id, _ in found.logprobs.top] == logits[0].topk(3).indices.tolist()
