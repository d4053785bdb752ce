"""Linear layers with quantised weights against the same weights in float64."""

import dataclasses

import pytest
import torch

from quire.base.errors import InvariantError
from quire.kernels.triton import linear
from quire.kernels.triton.linear import dequantize, in_order_launches, multiply, multiply_in_order
from quire.kernels.triton.quantized_weights import FLOAT4_LEVELS, join_rows, pack_float4, pack_float8, pack_integers
from tests.unit.kernels.gpu.conftest import draw


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


@pytest.mark.covering
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
    x = draw(5, num_columns, seed=1, dtype=dtype)
    check(x, dense, weight, device, bias=torch.linspace(-3, 3, 70).to(dtype))


def floats4(num_rows, num_columns, seed=0):
    """Return doubled floats of 4 bits, every one of them there, and scales of groups of 32."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.tensor(FLOAT4_LEVELS, dtype=torch.int8)
    codes = levels[torch.randint(0, len(levels), (num_rows, num_columns), generator=generator)]
    codes[0, : len(levels)] = levels
    powers = torch.randint(-9, 4, (num_rows, num_columns // 32), generator=generator)
    return codes, torch.ldexp(torch.ones(powers.shape), powers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_floats_of_4_bits_take_half_a_byte_and_are_exact(dtype, device):
    codes, scale = floats4(70, 192)
    dense = codes.double() * scale.double().repeat_interleave(32, 1)
    weight = pack_float4(codes, scale)
    assert weight.codes.nbytes == 70 * 192 / 2
    assert weight.shape == (70, 192)
    assert torch.equal(dequantize(on(device, weight), torch.float32).cpu().double(), dense)
    x = draw(5, 192, seed=1, dtype=dtype)
    check(x, dense, weight, device, bias=torch.linspace(-3, 3, 70).to(dtype))


def test_floats_of_4_bits_join_their_like_alone():
    parts = [pack_float4(*floats4(rows, 64, seed=rows)) for rows in (3, 16)]
    joined = join_rows(parts)
    assert joined.shape == (19, 64)
    assert torch.equal(joined.codes, torch.cat([part.codes for part in parts]))
    codes, scale, _ = integers(4, 64, 2, -8, 7)
    assert join_rows([parts[0], pack_integers(codes, scale)]) is None


def test_floats_of_4_bits_in_rows_that_no_run_divides_take_a_byte():
    codes, _ = floats4(4, 96)
    weight = pack_float4(codes[:, :75].contiguous(), torch.ones(4, 1))
    assert not weight.is_packed
    assert torch.equal(weight.codes, codes[:, :75])


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
    x = draw(12, 2048, seed=1, dtype=torch.bfloat16)
    assert linear.multiply_launches(torch.empty(12, 33, dtype=x.dtype), x, weight)[0].grid[2] == 4
    check(x, dense, weight, device)
    together = multiply(x.to(device), on(device, weight))
    assert torch.equal(multiply(x[7:8].to(device), on(device, weight)), together[7:8])


def test_groups_that_no_run_of_columns_fits_are_refused():
    codes, scale, _ = integers(4, 96, 6, -8, 7)
    with pytest.raises(InvariantError, match="multiples of 32"):
        pack_integers(codes, scale)


@pytest.mark.parametrize("low, high, num_groups", [(-8, 7, 3), (0, 15, 6), (-128, 127, 3)], ids=["4", "4-unsigned", "8"])
def test_rows_are_widened_as_the_weight_says(low, high, num_groups, device):
    codes, scale, offset = integers(9, 192, num_groups, low, high)
    weight = on(device, pack_integers(codes, scale, offset))
    spread = [part.repeat_interleave(192 // num_groups, 1) for part in (scale, offset)]
    expected = codes.float() * spread[0] + spread[1]
    assert torch.equal(dequantize(weight, torch.float32).cpu(), expected)
    ids = torch.tensor([7, 0, 7, 3])
    assert torch.equal(dequantize(weight, torch.bfloat16, ids.to(device)).cpu(), expected[ids].bfloat16())


def test_blocks_of_float8_may_end_before_their_scale_does(device):
    generator = torch.Generator().manual_seed(2)
    codes = torch.randn(70, 200, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 4, generator=generator) + 0.1
    dense = codes.float() * scale.repeat_interleave(64, 0)[:70].repeat_interleave(64, 1)[:, :200]
    weight = pack_float8(codes, scale, (64, 64))
    assert torch.equal(dequantize(on(device, weight), torch.float32).cpu(), dense)
    check(torch.randn(3, 200, generator=generator), dense, weight, device)


def test_columns_that_were_put_in_order_meet_their_inputs(device):
    codes, scale, _ = integers(40, 64, 2, -8, 7)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    dense = torch.empty(40, 64)
    dense[:, order] = codes.float() * scale.repeat_interleave(32, 1)
    weight = dataclasses.replace(pack_integers(codes, scale), columns=order.to(device))
    check(draw(2, 64, seed=4), dense, weight, device)


def test_joined_weights_are_their_rows_one_after_the_other(device):
    parts = [pack_integers(*integers(rows, 64, 2, -8, 7, seed=rows)[: 2 + rows % 2], limits=(-8, 7)) for rows in (3, 16, 5)]
    joined = join_rows([on(device, part) for part in parts])
    expected = torch.cat([dequantize(on(device, part), torch.float32) for part in parts])
    assert torch.equal(dequantize(joined, torch.float32), expected)
    assert join_rows([parts[0], pack_integers(*integers(4, 64, 1, -8, 7)[:2])]) is None
    codes = torch.ones(64, 64).to(torch.float8_e4m3fn)
    blocks = pack_float8(codes, torch.tensor([[1.0], [2.0]]), (32, 64))
    rows = pack_float8(codes, torch.full((64, 1), 3.0), (1, 64))
    assert join_rows([blocks, blocks]).scale_rows == 32
    mixed = join_rows([on(device, blocks), on(device, rows)])
    assert dequantize(mixed, torch.float32)[:, 0].cpu().tolist() == [1.0] * 32 + [2.0] * 32 + [3.0] * 64


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(70, 75), (33, 2048), (128, 256)], ids=["odd", "split", "whole"])
def test_products_in_order_are_those_of_float64(shape, dtype, device):
    generator = torch.Generator().manual_seed(5)
    weight, x = (torch.randn(size, generator=generator).to(dtype) for size in (shape, (19, shape[1])))
    bias = torch.linspace(-3, 3, shape[0]).to(dtype)
    expected = x.double() @ weight.double().T + bias.double()
    found = multiply_in_order(x.to(device), weight.to(device), bias.to(device)).cpu()
    tolerance = 2e-5 if dtype == torch.float32 else 8e-3
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["dense", "narrow", "offsets"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_at_any_number_of_rows_and_of_programs(kind, dtype, device, monkeypatch):
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(70, 1024, generator=generator).to(dtype).to(device)
    is_packed = kind != "dense"
    if is_packed:
        codes, scale, offset = integers(70, 1024, 8, -8, 7)
        weight = on(device, pack_integers(codes, scale, offset if kind == "offsets" else None))
    else:
        weight = torch.randn(70, 1024, generator=generator).to(dtype).to(device)
    product = multiply if is_packed else multiply_in_order
    shared = product(x, weight)
    monkeypatch.setattr(linear, "_MANY_PROGRAMS", 5)
    monkeypatch.setattr(linear, "_ROWS_OF_PROGRAM", 32)
    launches = linear.multiply_launches if is_packed else in_order_launches
    for count in (1, 17, 33, 70):
        found = product(x[:count], weight)
        assert torch.equal(found, product(x, weight)[:count])
    monkeypatch.undo()
    assert len(launches(shared, x, weight)) == 2
    for count in (1, 17, 33):
        assert torch.equal(product(x[:count], weight), shared[:count])
