"""sample: greedy and drawn tokens, their law, independence of the batch, errors of single rows, log probabilities."""

import math

import numpy as np
import pytest
import torch
from row_factory import PROMPT, make_request, make_row

from quire.base.errors import InvariantError
from quire.kernels.reference.noise import gumbel_noise
from quire.sampling import SamplingRow, sample, sampler

pytestmark = pytest.mark.usefixtures("sampling_path")

NEVER = -math.inf
V = 301

# Every kind of row that the sampler treats in its own way; `output` is what a row has generated so far.
KINDS = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.5, "output": [4, 4]},
    {"temperature": 1.0},
    {"temperature": 0.2},
    {"temperature": 3.0},
    {"top_k": 20},
    {"top_k": 1},
    {"top_p": 0.8},
    {"top_p": 0.999, "temperature": 2.0},
    {"min_p": 0.1},
    {"typical_p": 0.7},
    {"top_k": 30, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5, "output": [1, 2, 2, 9]},
    {"allowed_token_ids": [5, 6, 7, 8]},
    {"min_tokens": 3, "eos": [0, 1, 2], "logit_bias": {7: 4.0}},
]


def batch(seed=0):
    logits = torch.randn(len(KINDS), V, generator=torch.Generator().manual_seed(seed)) * 3
    return logits, [make_row(V, seed=100 + i, **kind) for i, kind in enumerate(KINDS)]


def tokens(logits, rows):
    found = sample(logits, rows)
    assert all(one.error is None for one in found)
    return [one.token_id for one in found]


def oracle_token(logits, row):
    """argmax(logit / T + noise) over the whole vocabulary, for rows without processors or truncations."""
    scaled = logits.float() * torch.tensor(row.inverse_temperature, dtype=torch.float32)
    return int((scaled + gumbel_noise([row.seed], [row.position], len(logits))[0]).argmax())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_greedy_takes_the_best_token_and_the_lowest_id_of_ties(dtype):
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[0, [250, 17, 90]] = 9.0
    logits[1] = 1.0
    logits[2, -1] = 9.0
    expected = [17, 0, V - 1, int(logits[3].float().argmax())]
    assert tokens(logits, [make_row(V, temperature=0)] * 4) == expected
    edited = [make_row(V, temperature=0, logit_bias={299: 0.0})] * 4
    assert tokens(logits, edited) == expected


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 4096, 40_001])
def test_lowest_id_wins_ties_in_every_size_and_path(vocab_size):
    logits = torch.zeros(3, vocab_size)
    rows = [make_row(vocab_size, temperature=0), make_row(vocab_size, temperature=0, logit_bias={0: 0.0})]
    assert tokens(logits[:2], rows) == [0, 0]
    rows.append(make_row(vocab_size, temperature=0))
    assert tokens(logits, rows) == [0, 0, 0]


def test_lowest_id_wins_ties_of_noisy_scores():
    logits = torch.zeros(3, V)
    logits[:, [60, 50, 70]] = 1e30  # no noise changes so large a logit
    assert tokens(logits, [make_row(V), make_row(V, top_k=3), make_row(V, min_p=0.5)]) == [50, 50, 50]


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0], ids=["dense", "default", "sparse"])
def test_unrestricted_rows_take_the_best_noisy_score(monkeypatch, temperature, share):
    monkeypatch.setattr(sampler, "_SPARSE_SHARE", share)
    logits = torch.randn(50, 2003, generator=torch.Generator().manual_seed(3)) * 6
    rows = [make_row(2003, seed=i, temperature=temperature) for i in range(50)]
    assert tokens(logits, rows) == [oracle_token(logits[i], row) for i, row in enumerate(rows)]


def test_tokens_do_not_depend_on_the_batch_or_its_order():
    logits, rows = batch()
    together = tokens(logits, rows)
    assert together == [tokens(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    generator = np.random.default_rng(0)
    for _ in range(5):
        order = generator.permutation(len(rows))[: generator.integers(1, len(rows) + 1)].tolist()
        assert tokens(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_tokens_do_not_depend_on_the_size_of_a_pass(monkeypatch):
    logits, rows = batch()
    expected = sample(logits, rows)
    monkeypatch.setattr(sampler, "_PASS_ELEMENTS", 2 * V)
    assert sample(logits, rows) == expected


def generate(request, choice, num_tokens, preempt_at=()):
    """Sample a sequence from logits that depend on the last two tokens; rebuild the row at the given lengths."""
    table = torch.randn(97, V, generator=torch.Generator().manual_seed(9)) * 2
    row = SamplingRow(request, choice, request.prompt_token_ids, V)
    for length in range(num_tokens):
        if length in preempt_at:
            row = SamplingRow(request, choice, (*request.prompt_token_ids, *row.output_token_ids), V)
        known = (*request.prompt_token_ids, *row.output_token_ids)
        (found,) = sample(table[(31 * known[-1] + known[-2]) % 97][None], [row])
        row.append(found.token_id)
    return row.output_token_ids


@pytest.mark.covering
@pytest.mark.parametrize(
    "kind", [{}, {"top_p": 0.9, "frequency_penalty": 1.0, "repetition_penalty": 1.2}, {"typical_p": 0.9}], ids=str
)
def test_resumed_sequence_goes_on_with_the_same_tokens(kind):
    request = make_request(**kind)
    expected = generate(request, 0, 40)
    assert generate(request, 0, 40, preempt_at=(1, 2, 20, 39)) == expected
    assert len(set(expected)) > 5


def test_choices_and_seeds_differ_and_a_seed_repeats_itself():
    request = make_request(n=2)
    first = generate(request, 0, 30)
    assert generate(request, 0, 30) == first
    assert generate(request, 1, 30) != first
    assert generate(make_request(n=2, seed=8), 0, 30) != first


def chi_square_limit(freedom):
    """Return the value that chi-square exceeds with probability 1e-4 (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


def draw_counts(logits, num_draws=8_000, **fields):
    """Draw with 200 seeds at successive positions, all independent; return the counts of each token."""
    rows = [make_row(len(logits), seed=seed, **fields) for seed in range(200)]
    counts = torch.zeros(len(logits))
    for _ in range(num_draws // 200):
        drawn = tokens(logits.expand(200, -1), rows)
        counts += torch.bincount(torch.tensor(drawn), minlength=len(logits))
        for row, token_id in zip(rows, drawn, strict=True):
            row.append(token_id)
    return counts


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, range(12)),
        ({"temperature": 0.5}, range(12)),
        ({"temperature": 2.0, "top_k": 5}, range(5)),
        ({"top_p": 0.8}, None),
        ({"min_p": 0.2}, None),
    ],
    ids=str,
)
def test_frequencies_follow_the_distribution(fields, kept):
    logits = torch.linspace(2.0, -1.0, 12)
    probs = torch.softmax(logits.double() / fields.get("temperature", 1.0), 0)
    if "top_p" in fields:
        kept = range(int((probs.cumsum(0) < fields["top_p"]).sum()) + 1)
    if "min_p" in fields:
        kept = range(int((probs >= fields["min_p"] * probs[0]).sum()))
    probs = probs[: len(kept)] / probs[: len(kept)].sum()
    counts = draw_counts(logits, **fields)
    assert counts[len(kept) :].sum() == 0
    expected = probs * counts.sum()
    assert ((counts[: len(kept)] - expected) ** 2 / expected).sum() < chi_square_limit(len(kept) - 1)


def test_chi_square_notices_a_slightly_wrong_distribution():
    logits = torch.linspace(2.0, -1.0, 12)
    expected = torch.softmax(logits.double() / 1.1, 0) * 20_000
    assert ((draw_counts(logits) - expected) ** 2 / expected).sum() > chi_square_limit(11)


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e300])
def test_extreme_temperatures_still_give_tokens(temperature):
    logits = torch.tensor([[0.0, 20.0, -20.0, NEVER, 19.0, NEVER]])
    (token_id,) = tokens(logits, [make_row(6, temperature=temperature)])
    assert token_id in ((0, 1, 2, 4) if temperature > 1 else (1,))


def test_rows_without_usable_logits_get_an_error_and_the_others_their_tokens():
    logits, rows = batch()
    expected = tokens(logits, rows)
    for cause, value, where in [("NaN", math.nan, 5), ("+inf", math.inf, 5), ("-inf", NEVER, slice(None))]:
        for bad in range(len(rows)):
            broken = logits.clone()
            broken[bad, where] = value
            found = sample(broken, rows)
            assert found[bad].token_id is None
            assert cause in found[bad].error
            assert [one.token_id for i, one in enumerate(found) if i != bad] == expected[:bad] + expected[bad + 1 :]
            assert all(one.error is None for i, one in enumerate(found) if i != bad)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_row_whose_processors_exclude_every_token_gets_an_error(temperature):
    rows = [
        make_row(V, temperature=temperature, allowed_token_ids=[V + 5]),
        make_row(V, temperature=temperature, allowed_token_ids=[2], min_tokens=1, eos=[2]),
        make_row(V, temperature=temperature, allowed_token_ids=[2], min_tokens=1, eos=[2], output=[9]),
    ]
    found = sample(torch.zeros(3, V), rows)
    assert [one.token_id for one in found] == [None, None, 2]
    assert all("exclude every token" in one.error for one in found[:2])


def test_overflow_after_temperature_is_an_error():
    logits = torch.zeros(1, V)
    logits[0, 3] = 3e38
    (found,) = sample(logits, [make_row(V, temperature=0.1)])
    assert "range of f32" in found.error


def test_end_of_sequence_is_not_drawn_before_min_tokens():
    logits = torch.zeros(1, 8)
    logits[0, 2] = 9.0
    for ignore_eos in (False, True):
        row = make_row(8, min_tokens=4, eos=[2], ignore_eos=ignore_eos, temperature=0)
        for _ in range(6):
            (found,) = sample(logits, [row])
            row.append(found.token_id)
        assert row.output_token_ids == [0, 0, 0, 0, 2, 2]


def test_log_probabilities_are_of_the_raw_logits():
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    rows = [
        make_row(V, temperature=0, logprobs=3),
        make_row(V, temperature=0.5, top_k=4, logit_bias={8: 100.0}, logprobs=0),
        make_row(V, temperature=0, repetition_penalty=2.0, logprobs=-1),
        make_row(V),
    ]
    found = sample(logits, rows)
    raw = torch.log_softmax(logits.double(), 1)
    assert found[1].token_id == 8
    assert found[3].logprobs is None
    for i, num_top in enumerate((3, 0, V)):
        one = found[i].logprobs
        assert one.token_id == found[i].token_id
        assert one.logprob == pytest.approx(raw[i, one.token_id].item(), abs=1e-5)
        assert one.rank == 1 + int((raw[i] > raw[i, one.token_id]).sum())
        assert len(one.top) == num_top
    assert found[0].logprobs.top[0] == (found[0].token_id, found[0].logprobs.logprob)


def test_log_probability_is_there_when_choices_are_ranked():
    (found,) = sample(torch.zeros(1, 8), [make_row(8, best_of=2)])
    assert found.logprobs.logprob == pytest.approx(-math.log(8))
    assert found.logprobs.top == ()


def test_logits_and_rows_are_not_changed():
    logits, rows = batch()
    copy, positions = logits.clone(), [row.position for row in rows]
    sample(logits, rows)
    assert torch.equal(logits, copy)
    assert [row.position for row in rows] == positions


def test_nothing_is_sampled_from_no_rows():
    assert sample(torch.zeros(0, V), []) == []


@pytest.mark.parametrize("shape", [(2, V), (1, V + 1), (V,)], ids=str)
def test_logits_that_do_not_fit_the_rows_are_an_internal_error(shape):
    with pytest.raises(InvariantError, match="do not fit 1 rows"):
        sample(torch.zeros(shape), [make_row(V, prompt=PROMPT)])
