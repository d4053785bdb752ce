"""The mass of a token: an independent scalar port bit for bit, golden values, accuracy, limits."""

import math

import numpy as np
import pytest
import torch

from quire.kernels.reference.mass import UNIT, fixed_point_exp

F = np.float32
GOLDEN = {0.0: 2**44, -0.5: 10670200324096, -1.0: 6471803731968, -10.0: 798684032, -30.0: 2, -31.1: 1, -32.0: 0, -math.inf: 0}


def scalar_units(depth):
    x = max(F(depth), F(-32))
    n = np.rint(F(x * F(1.44269504)))
    r = F(F(x - F(n * F(0.693359375))) + F(n * F(2.12194440e-4)))
    y = F(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = F(F(y * r) + F(c))
    y = F(F(y * F(r * r)) + F(r + F(1)))
    return int(np.rint(float(y) * 2.0 ** (float(n) + 44)))


def depths():
    spread = torch.rand(20_000, generator=torch.Generator().manual_seed(0)) * -34
    small = torch.tensor([0.0, -0.0, -1e-45, -1e-38, -1e-8, -1e-4, -31.99999, -32.0, -32.00001, -3e38, -math.inf])
    return torch.cat((spread, small, spread[:3000] * 1e-5))


def test_units_equal_a_scalar_port():
    assert fixed_point_exp(depths()).tolist() == [scalar_units(depth) for depth in depths().tolist()]


def test_golden_units():
    assert dict(zip(GOLDEN, fixed_point_exp(torch.tensor(list(GOLDEN))).tolist(), strict=True)) == GOLDEN


def test_units_are_accurate():
    exact = depths().double().exp()
    # Half a unit of rounding, and the errors of the polynomial and of its f32 operations.
    assert ((fixed_point_exp(depths()) * UNIT - exact).abs() <= 0.5 * UNIT + 3e-7 * exact).all()


@pytest.mark.parametrize("shape", [(0,), (3, 5), (2, 40_000)], ids=str)
def test_shape_is_kept_and_the_depths_not_changed(shape):
    depth = -torch.rand(shape, generator=torch.Generator().manual_seed(1))
    copy = depth.clone()
    units = fixed_point_exp(depth)
    assert units.shape == depth.shape
    assert units.dtype == torch.int64
    assert torch.equal(
        units.view(-1), torch.cat([fixed_point_exp(row) for row in depth.view(-1).split(997)]) if units.numel() else units
    )
    assert torch.equal(depth, copy)
