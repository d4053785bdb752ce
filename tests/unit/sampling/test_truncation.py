"""The truncations against a slow oracle and transformers; the head path and the lone path agree."""

import math

import pytest
import torch
from row_factory import make_row

from quire.sampling import truncation
from quire.sampling.truncation import has_truncation, truncate

NEVER = -math.inf

CASES = {
    "top_k": {"top_k": 7},
    "top_k_1": {"top_k": 1},
    "top_k_above_vocabulary": {"top_k": 5000},
    "top_p": {"top_p": 0.8},
    "top_p_small": {"top_p": 1e-6},
    "top_p_high": {"top_p": 0.999},
    "min_p": {"min_p": 0.05},
    "min_p_1": {"min_p": 1.0},
    "min_p_tiny": {"min_p": 1e-9},
    "typical": {"typical_p": 0.6},
    "typical_high": {"typical_p": 0.99},
    "k_p": {"top_k": 40, "top_p": 0.7},
    "k_typical": {"top_k": 40, "typical_p": 0.7},
    "k_m": {"top_k": 30, "min_p": 0.1},
    "typical_p_m": {"typical_p": 0.8, "top_p": 0.7, "min_p": 0.2},
    "all": {"top_k": 100, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.02},
}


def oracle(values, p):
    """The kept token ids, in plain Python on f64."""
    kept = {i: v for i, v in enumerate(values.tolist()) if v > NEVER}

    def probabilities():
        peak = max(kept.values())
        weights = {i: math.exp(v - peak) for i, v in kept.items()}
        total = math.fsum(weights.values())
        return {i: w / total for i, w in weights.items()}

    if 0 < p.top_k < len(kept):
        floor = sorted(kept.values())[-p.top_k]
        kept = {i: v for i, v in kept.items() if v >= floor}
    if p.typical_p < 1:
        probs = probabilities()
        entropy = -math.fsum(q * math.log(q) for q in probs.values() if q > 0)
        distance = {i: abs(-math.log(q) - entropy) if q > 0 else math.inf for i, q in probs.items()}
        mass, limit = 0.0, math.inf
        for i in sorted(distance, key=distance.get):
            mass, limit = mass + probs[i], distance[i]
            if mass >= p.typical_p:
                break
        kept = {i: v for i, v in kept.items() if distance[i] <= limit + 1e-12}
    if p.top_p < 1:
        probs = probabilities()
        mass, limit = 0.0, NEVER
        for i in sorted(kept, key=kept.get, reverse=True):
            mass, limit = mass + probs[i], kept[i]
            if mass >= p.top_p:
                break
        kept = {i: v for i, v in kept.items() if v >= limit}
    if p.min_p > 0:
        floor = max(kept.values()) + math.log(p.min_p)
        kept = {i: v for i, v in kept.items() if v >= floor - 1e-9}
    return set(kept)


def run(values, rows):
    kept = [set() for _ in rows]
    for part in truncate(values, list(range(len(rows))), [row.params for row in rows]):
        pairs = list(zip(part.row_ids.tolist(), part.token_ids.tolist(), strict=True))
        assert torch.equal(part.values, values[part.row_ids, part.token_ids])
        for row_id, token_id in pairs:
            assert token_id not in kept[row_id]
            kept[row_id].add(token_id)
    return kept


def random_logits(rows, vocab_size, scale, seed=0):
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("vocab_size", [5, 257, 3001])
@pytest.mark.parametrize("scale", [0.3, 6.0], ids=["flat", "peaked"])
def test_candidates_equal_the_oracle(fields, vocab_size, scale):
    values = random_logits(3, vocab_size, scale)
    values[1, ::3] = NEVER
    rows = [make_row(vocab_size, **fields)] * 3
    assert run(values, rows) == [oracle(values[i], rows[i].params) for i in range(3)]


@pytest.mark.parametrize("scale", [0.3, 2.5, 6.0], ids=["flat", "middle", "peaked"])
def test_rows_of_a_batch_equal_rows_alone(scale):
    rows = [make_row(2003, **fields) for fields in CASES.values()]
    values = random_logits(len(rows), 2003, scale, seed=2)
    together = run(values, rows)
    assert together == [run(values[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    order = list(range(len(rows)))[::-1]
    assert run(values[order], [rows[i] for i in order]) == [together[i] for i in order]


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
def test_ties_at_a_cut_are_all_kept(fields):
    values = random_logits(2, 1500, 2.0, seed=3).mul_(1.5).round_()
    rows = [make_row(1500, **fields)] * 2
    assert run(values, rows) == [oracle(values[i], rows[i].params) for i in range(2)]


@pytest.mark.parametrize("fields", [{"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 2000}], ids=str)
def test_all_tokens_stay_when_all_are_equal(fields):
    values = torch.full((1, 3000), 2.5)
    kept = run(values, [make_row(3000, **fields)])
    assert kept == [set(range(3000))]


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
def test_only_candidate_is_kept(fields):
    values = torch.full((1, 400), NEVER)
    values[0, 17] = -3.0
    assert run(values, [make_row(400, **fields)]) == [{17}]


@pytest.mark.parametrize("head_tokens", [2, 16, 100_000])
def test_width_of_the_head_does_not_change_the_candidates(monkeypatch, head_tokens):
    rows = [make_row(900, **fields) for fields in CASES.values()]
    values = random_logits(len(rows), 900, 3.0, seed=5)
    expected = run(values, rows)
    monkeypatch.setattr(truncation, "_HEAD_TOKENS", head_tokens)
    assert run(values, rows) == expected


def test_truncation_is_recognised():
    for fields in ({}, {"top_k": -1}, {"top_k": 0}, {"top_k": 5}, {"top_k": 6}):
        assert not has_truncation(make_row(5, **fields).params, 5)
    assert all(has_truncation(make_row(5, **fields).params, 5001) for fields in CASES.values())


@pytest.mark.golden
@pytest.mark.parametrize(
    ("name", "value", "warper"),
    [
        ("top_k", 9, "TopKLogitsWarper"),
        ("top_p", 0.7, "TopPLogitsWarper"),
        ("min_p", 0.08, "MinPLogitsWarper"),
        ("typical_p", 0.7, "TypicalLogitsWarper"),
    ],
)
@pytest.mark.parametrize("scale", [0.5, 4.0], ids=["flat", "peaked"])
def test_candidates_equal_transformers(name, value, warper, scale):
    transformers = pytest.importorskip("transformers")
    values = random_logits(4, 601, scale, seed=4)
    expected = getattr(transformers, warper)(value)(torch.zeros(4, 1, dtype=torch.int64), values.clone()) > NEVER
    kept = run(values, [make_row(601, **{name: value})] * 4)
    assert kept == [set(row.nonzero()[:, 0].tolist()) for row in expected]
