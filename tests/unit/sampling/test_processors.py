"""Each processor against a slow oracle, their order, and transformers where it has the same one."""

import math

import pytest
import torch
from row_factory import PROMPT, make_row

from quire.sampling.processors import process_logits

V = 23
NEVER = -math.inf


def oracle(logits, row, prompt, output):
    """The processors in plain Python, one row, one token at a time."""
    p = row.params
    x = [float(v) for v in logits]
    if p.allowed_token_ids is not None:
        x = [v if i in p.allowed_token_ids else NEVER for i, v in enumerate(x)]
    known = list(prompt) + list(output)
    if len(output) < p.min_tokens:
        for token in set(ORACLE_EOS.get(id(row), ())) | set(p.stop_token_ids):
            x[token] = NEVER
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    for token in set(known):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(output):
        x[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    return torch.tensor(x)


ORACLE_EOS: dict = {}

CASES = {
    "none": {},
    "allowed": {"allowed_token_ids": [2, 5, 7]},
    "min_tokens_not_reached": {"min_tokens": 4, "eos": [0], "stop_token_ids": [6, 3]},
    "min_tokens_ignore_eos": {"min_tokens": 9, "eos": [0], "stop_token_ids": [6], "ignore_eos": True},
    "min_tokens_reached": {"min_tokens": 3, "eos": [0], "stop_token_ids": [6, 3]},
    "bias": {"logit_bias": {0: 5.0, 8: -100.0, 22: 0.25}},
    "repetition": {"repetition_penalty": 1.5},
    "repetition_below_one": {"repetition_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.9},
    "presence": {"presence_penalty": -1.3},
    "all": {
        "allowed_token_ids": [0, 1, 2, 8, 9, 10],
        "min_tokens": 7,
        "eos": [0],
        "logit_bias": {1: 3.0, 2: -4.0, 10: 9.0},
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.2,
    },
}
OUTPUT = [8, 2, 8]


def build(fields, output=OUTPUT):
    row = make_row(V, output=output, **fields)
    ORACLE_EOS[id(row)] = fields.get("eos", ())
    return row


def random_logits(rows, seed=0):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("output", [[], [8], OUTPUT], ids=["fresh", "one", "three"])
def test_processors_equal_the_oracle(fields, output):
    row, logits = build(fields, output), random_logits(1)
    expected = oracle(logits[0], row, PROMPT, output)
    process_logits(logits, [row])
    torch.testing.assert_close(logits[0], expected, atol=1e-5, rtol=1e-6)


def test_rows_of_a_batch_do_not_touch_each_other():
    rows = [build(fields) for fields in CASES.values()]
    logits = random_logits(len(rows), seed=1)
    expected = torch.stack([oracle(logits[i], row, PROMPT, OUTPUT) for i, row in enumerate(rows)])
    plain = logits[0].clone()
    process_logits(logits, rows)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-6)
    assert torch.equal(logits[0], plain)


def test_masked_tokens_stay_masked_through_bias_and_penalties():
    row = build({"allowed_token_ids": [8], "logit_bias": {5: 100.0}, "repetition_penalty": 0.01, "frequency_penalty": -2.0})
    logits = random_logits(1)
    process_logits(logits, [row])
    assert (logits[0] > NEVER).nonzero().tolist() == [[8]]


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_extreme_repetition_penalty_makes_no_nan(penalty):
    logits = torch.tensor([[0.0, 1.0, -1.0, 1e20, NEVER, -1e20]])
    process_logits(logits, [make_row(6, prompt=range(6), repetition_penalty=penalty)])
    assert not logits.isnan().any()


@pytest.mark.golden
@pytest.mark.parametrize("penalty", [1.3, 0.6])
def test_repetition_penalty_equals_transformers(penalty):
    transformers = pytest.importorskip("transformers")
    logits = random_logits(1)
    known = torch.tensor([[*PROMPT, *OUTPUT]])
    expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)(known, logits.clone())
    process_logits(logits, [build({"repetition_penalty": penalty})])
    torch.testing.assert_close(logits, expected)
