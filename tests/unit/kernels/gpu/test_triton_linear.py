"""Linear layers with narrow weights against the same weights in float64."""

import dataclasses

import pytest
import torch

from quire.base.errors import InvariantError
from quire.kernels.triton import linear
from quire.kernels.triton.linear import multiply, pack_float8, pack_integers


def on(device, weight):
    offsets = None if weight.offsets is None else weight.offsets.to(device)
    return dataclasses.replace(weight, codes=weight.codes.to(device), scales=weight.scales.to(device), offsets=offsets)


def check(x, dense, weight, device, bias=None):
    found = multiply(x.to(device), on(device, weight), None if bias is None else bias.to(device)).cpu()
    expected = x.double() @ dense.double().T + (0 if bias is None else bias.double())
    tolerance = 2e-5 if x.dtype == torch.float32 else 8e-3
    assert found.dtype == x.dtype
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()


def integers(num_rows, num_columns, num_groups, low, high, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(low, high + 1, (num_rows, num_columns), generator=generator, dtype=torch.int8)
    scale = torch.rand(num_rows, num_groups, generator=generator) + 0.1
    return codes, scale, torch.randn(num_rows, num_groups, generator=generator)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_offset", [False, True], ids=["symmetric", "offset"])
@pytest.mark.parametrize(
    "num_groups, low, high", [(3, -8, 7), (6, 0, 15), (3, -128, 127), (1, -127, 127)], ids=["4", "4-unsigned", "8", "8-row"]
)
def test_integers_are_multiplied_as_they_stand(num_groups, low, high, has_offset, dtype, device):
    num_columns = 192 if num_groups > 1 else 75
    codes, scale, offset = integers(70, num_columns, num_groups, low, high)
    dense = codes.double() * scale.double().repeat_interleave(num_columns // num_groups, 1)
    if has_offset:
        dense += offset.double().repeat_interleave(num_columns // num_groups, 1)
    weight = pack_integers(codes, scale, offset if has_offset else None)
    assert weight.is_packed == (high - low == 15)
    assert weight.shape == (70, num_columns)
    x = torch.randn(5, num_columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    check(x, dense, weight, device, bias=torch.linspace(-3, 3, 70).to(dtype))


@pytest.mark.parametrize("block", [(64, 64), (1, 192), (1000, 1000)], ids=["blocks", "rows", "tensor"])
def test_float8_is_multiplied_with_the_scale_of_its_block(block, device):
    generator = torch.Generator().manual_seed(2)
    weight = (20 * torch.randn(100, 192, generator=generator)).to(torch.float8_e4m3fn)
    grid = (-(-100 // block[0]), -(-192 // block[1]))
    scale = torch.rand(grid, generator=generator) + 0.1
    rows = torch.arange(100) // block[0]
    dense = weight.double() * scale.double()[rows][:, torch.arange(192) // block[1]]
    x = torch.randn(19, 192, generator=generator).bfloat16()
    check(x, dense, pack_float8(weight, scale, block), device)


def test_sums_are_split_by_the_shape_of_the_weight_alone(device):
    codes, scale, _ = integers(33, 2048, 16, -8, 7)
    weight = pack_integers(codes, scale)
    dense = codes.double() * scale.double().repeat_interleave(128, 1)
    x = torch.randn(12, 2048, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert linear.multiply_launches(torch.empty(12, 33, dtype=x.dtype), x, weight)[0].grid[2] == 4
    check(x, dense, weight, device)
    together = multiply(x.to(device), on(device, weight))
    assert torch.equal(multiply(x[7:8].to(device), on(device, weight)), together[7:8])


def test_groups_that_no_run_of_columns_fits_are_refused():
    codes, scale, _ = integers(4, 96, 6, -8, 7)
    with pytest.raises(InvariantError, match="multiples of 32"):
        pack_integers(codes, scale)
