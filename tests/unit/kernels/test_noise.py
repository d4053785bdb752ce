"""The noise: Philox known answers, an independent scalar port bit for bit, accuracy, distribution, keys."""

import math

import numpy as np
import pytest
import torch

from quire.kernels.reference import noise as noise_module
from quire.kernels.reference.noise import (
    MAX_GUMBEL,
    MIN_GUMBEL,
    gumbel_from_words,
    gumbel_noise,
    gumbel_noise_at,
    gumbel_noise_flat,
    key_columns,
    philox4x32,
)

F = np.float32
MASK = 0xFFFFFFFF
EDGE_WORDS = [0, 1, 2, 3, 255, 2**23, 2**24 - 1, 2**24 + 1, 2**31, 2**32 - 2**8, 2**32 - 2, 2**32 - 1, 1257966796, 1257966797]

GOLDEN_KEYS = [(0, 0, 0, 0), (0, 0, 5, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 1), (2**63, 9, 3, 2)]
GOLDEN = ["0x3f2cc257", "0x3f4cab23", "0xbf4af6b1", "0x3f1dbf22", "0x3ea33013", "0x4023a47c"]
GOLDEN_EDGES = ["0x41b6fda9", "0x3ebba795", "0xc033f049"]


def scalar_philox(counter, key):
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def scalar_log_polynomial(f, e):
    coefficients = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1)
    coefficients += (-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)
    z = F(f * f)
    y = F(coefficients[0])
    for c in coefficients[1:]:
        y = F(F(y * f) + F(c))
    y = F(F(y * f) * z)
    y = F(y + F(e * F(-2.12194440e-4)))
    y = F(y - F(z * F(0.5)))
    return F(F(f + y) + F(e * F(0.693359375)))


def scalar_ln(x):
    bits = int(x.view(np.int32))
    exponent = (bits - 0x3F3504F3) >> 23
    mantissa = np.int32(bits - (exponent << 23)).view(np.float32)
    return scalar_log_polynomial(F(mantissa - F(1)), F(exponent))


def scalar_gumbel(word):
    v = min(F(F(F(np.uint32(word)) + F(0.5)) * F(2.0**-32)), F(1 - 2.0**-24))
    e = F(-scalar_log_polynomial(F(-v), F(0))) if v <= F(0.29289323091506958) else F(-scalar_ln(F(F(1) - v)))
    return F(-scalar_ln(e))


def scalar_noise(seed, position, token_id, stream=0):
    words = scalar_philox((token_id >> 2, position, stream, 0), (seed & MASK, seed >> 32))
    return scalar_gumbel(words[token_id & 3])


def bits(tensor):
    return tensor.contiguous().view(torch.int32).tolist()


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, answer):
    words = philox4x32(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(word.item() for word in words) == answer


def test_gumbel_equals_the_scalar_port_bit_for_bit():
    words = EDGE_WORDS + np.random.default_rng(0).integers(0, 2**32, 2000).tolist() + [2**i for i in range(32)]
    ours = gumbel_from_words(torch.tensor(words))
    assert bits(ours) == [int(scalar_gumbel(word).view(np.int32)) for word in words]


def test_noise_equals_the_scalar_port_bit_for_bit():
    seeds, positions = [0, 2**64 - 1, 0x0123456789ABCDEF], [0, 2**31 + 5, 77]
    ours = gumbel_noise(seeds, positions, 41, stream=3)
    theirs = [[int(scalar_noise(s, p, t, 3).view(np.int32)) for t in range(41)] for s, p in zip(seeds, positions, strict=True)]
    assert bits(ours) == theirs


def test_golden_bit_patterns():
    """Frozen: a port or a change that moves one of these changes what every seeded request returns."""
    found = [
        hex(int(gumbel_noise([seed], [position], 6, stream)[0, token].view(torch.int32)) & MASK)
        for seed, position, token, stream in GOLDEN_KEYS
    ]
    assert found == GOLDEN
    edges = [hex(pattern & MASK) for pattern in bits(gumbel_from_words(torch.tensor([0, 2**31, 2**32 - 1])))]
    assert edges == GOLDEN_EDGES


def test_gumbel_is_as_accurate_as_f32_allows():
    words = torch.tensor(EDGE_WORDS + np.random.default_rng(1).integers(0, 2**32, 100_000).tolist() + list(range(1000)))
    v = ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24).double()
    exact = -torch.log(-torch.log1p(-v))
    ours = gumbel_from_words(words).double()
    # E carries a relative error of about 1e-7, which is the absolute error of G beside the rounding of G itself.
    assert ((ours - exact).abs() <= 3e-7 + 1.2e-7 * exact.abs()).all()


def test_bounds_hold_at_the_extreme_words():
    extremes = gumbel_from_words(torch.tensor([0, 2**32 - 1]))
    assert 22.87 < extremes[0] <= MAX_GUMBEL
    assert MIN_GUMBEL <= extremes[1] < -2.81


def test_noise_follows_the_gumbel_distribution():
    sample = gumbel_noise(list(range(20)), [7 * i for i in range(20)], 5000).double().flatten().sort().values
    n = len(sample)
    assert abs(sample.mean().item() - 0.5772157) < 5 * 1.2825 / math.sqrt(n)
    assert abs(sample.var().item() - math.pi**2 / 6) < 0.05
    cdf = torch.exp(-torch.exp(-sample))
    steps = torch.arange(n, dtype=torch.float64)
    distance = torch.maximum((cdf - steps / n).abs().max(), ((steps + 1) / n - cdf).abs().max()).item()
    assert distance * math.sqrt(n) < 1.95  # Kolmogorov-Smirnov at p = 0.001


def test_neighbours_in_seed_position_token_and_stream_are_uncorrelated():
    base = gumbel_noise([1], [1], 20_000)[0].double()
    others = [
        gumbel_noise([2], [1], 20_000)[0],
        gumbel_noise([1 + 2**32], [1], 20_000)[0],
        gumbel_noise([1], [2], 20_000)[0],
        gumbel_noise([1], [1], 20_000, stream=1)[0],
        base.roll(1),
    ]
    for other in others:
        assert abs(torch.corrcoef(torch.stack((base, other.double())))[0, 1].item()) < 0.03


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 127, 4099])
def test_noise_of_a_token_does_not_depend_on_the_vocabulary_size(vocab_size):
    assert torch.equal(gumbel_noise([5, 6], [1, 2], vocab_size), gumbel_noise([5, 6], [1, 2], 5003)[:, :vocab_size])


def test_noise_of_a_row_does_not_depend_on_its_batch():
    seeds, positions = [3, 2**64 - 3, 5, 7], [4, 0, 4, 9]
    whole = gumbel_noise(seeds, positions, 1003)
    order = [2, 0, 3, 1]
    assert torch.equal(gumbel_noise([seeds[i] for i in order], [positions[i] for i in order], 1003), whole[order])
    for i in range(4):
        assert torch.equal(gumbel_noise([seeds[i]], [positions[i]], 1003)[0], whole[i])


@pytest.mark.parametrize("chunk", [4, 64, 4096])
def test_tiles_do_not_change_the_noise(monkeypatch, chunk):
    seeds, positions = [1, 2, 3], [9, 8, 7]
    token_ids = torch.randint(0, 1003, (3, 50), generator=torch.Generator().manual_seed(0))
    whole, gathered = gumbel_noise(seeds, positions, 1003), gumbel_noise_at(seeds, positions, token_ids)
    monkeypatch.setattr(noise_module, "_CHUNK_ELEMENTS", chunk)
    assert torch.equal(gumbel_noise(seeds, positions, 1003), whole)
    assert torch.equal(gumbel_noise_at(seeds, positions, token_ids), gathered)


@pytest.mark.parametrize("stream", [0, 1, 2, 3])
def test_gathered_noise_equals_the_whole_vocabulary_gathered(stream):
    seeds, positions = [11, 2**40, 2**64 - 1], [0, 100, 5]
    token_ids = torch.randint(0, 997, (3, 40), generator=torch.Generator().manual_seed(1))
    whole = gumbel_noise(seeds, positions, 997, stream)
    assert torch.equal(gumbel_noise_at(seeds, positions, token_ids, stream), whole.gather(1, token_ids))
    row_ids = torch.tensor([2, 0, 2])
    flat = gumbel_noise_flat(key_columns(seeds, positions), row_ids, torch.tensor([996, 5, 0]), stream)
    assert torch.equal(flat, whole[row_ids, torch.tensor([996, 5, 0])])


def test_no_rows_and_no_candidates_give_empty_noise():
    assert gumbel_noise([], [], 10).shape == (0, 10)
    assert gumbel_noise_at([1, 2], [0, 0], torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0)
