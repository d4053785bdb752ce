"""Drafts are drawn alike with and without the native kernels."""

import pytest
import torch

from quire.kernels.native import load_native
from quire.sampling import drafting
from tests.unit.sampling.row_factory import make_row

ROWS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 9, "top_p": 0.9},
    {"temperature": 0.8},
    {"temperature": 1.2, "min_p": 0.2},
    {"temperature": 1.0, "top_p": 0.3},
    {"temperature": 1.0, "top_k": 1},
]


@pytest.mark.parametrize("seed", range(8))
def test_torch_draws_the_drafts_of_the_native_sampler_with_cuts(monkeypatch, seed):
    if load_native() is None:
        pytest.skip("the native kernels are not built or turned off by QUIRE_NATIVE=0")
    logits = torch.randn(len(ROWS), 97, generator=torch.Generator().manual_seed(seed))
    rows, positions = [make_row(97, seed=seed, **options) for options in ROWS], list(range(5, 5 + len(ROWS)))
    expected = drafting.draw_drafts(logits, rows, positions)
    monkeypatch.setattr(drafting, "load_native", lambda: None)
    assert drafting.draw_drafts(logits, rows, positions) == expected
    assert expected[5] == int(logits[5].argmax())


def test_a_row_without_a_finite_logit_gets_any_token(monkeypatch):
    monkeypatch.setattr(drafting, "load_native", lambda: None)
    (token_id,) = drafting.draw_drafts(torch.full((1, 7), -torch.inf), [make_row(7, top_k=2)], [5])
    assert 0 <= token_id < 7
