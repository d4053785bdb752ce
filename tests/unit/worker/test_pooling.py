"""Pooler: exact against f64 by hand, and the same bits however the prompt was cut."""

import numpy as np
import pytest

from quire.contracts.pooling_params import PoolingParams
from quire.worker.pooling import Pooler


def hidden_states(num_tokens, size=24, seed=0):
    rng = np.random.default_rng(seed)
    # Over many magnitudes, so that another order of summation would show.
    return (rng.standard_normal((num_tokens, size)) * 10.0 ** rng.integers(-6, 7, (num_tokens, size))).astype(np.float32)


def pool(parts, **params):
    pooler = Pooler(PoolingParams(**params))
    for part in parts:
        pooler.add(part)
    return pooler.result()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dimensions", [None, 1, 24])
def test_mean_has_the_same_bits_when_the_prompt_is_cut_anywhere(normalize, dimensions):
    hidden = hidden_states(200)
    params = {"pooling": "mean", "normalize": normalize, "dimensions": dimensions}
    whole = pool([hidden], **params)
    rng = np.random.default_rng(1)
    for num_cuts in (1, 5, 199):
        cuts = sorted(rng.choice(np.arange(1, 200), num_cuts, replace=False))
        assert pool(np.split(hidden, cuts), **params) == whole
    mean = hidden.astype(np.float64).mean(0)[:dimensions]
    expected = mean / np.linalg.norm(mean) if normalize else mean
    np.testing.assert_allclose(whole, expected, rtol=1e-6)


def test_last_is_handed_back_as_it_is():
    hidden = hidden_states(1)
    assert pool([hidden], pooling="last", normalize=False) == tuple(hidden[0].tolist())


def test_truncated_vector_has_length_one():
    vector = pool([hidden_states(3)], pooling="mean", dimensions=5)
    assert len(vector) == 5
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-6)


def test_zeros_stay_zeros():
    assert pool([np.zeros((2, 3), np.float32)], pooling="mean") == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("normalize", [True, False])
def test_there_is_no_vector_when_a_value_is_not_finite(value, normalize):
    hidden = hidden_states(3)
    hidden[1, 2] = value
    assert pool([hidden], pooling="mean", normalize=normalize) is None


def test_there_is_no_vector_when_infinities_cancel():
    hidden = hidden_states(2)
    hidden[:, 0] = np.inf, -np.inf
    assert pool([hidden], pooling="mean") is None
