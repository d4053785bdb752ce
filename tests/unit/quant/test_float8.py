"""Float8Weight: cut and joined it stays the numbers that it stands for; quantising keeps each row's range."""

import torch

from quire.quant.float8 import Float8Weight, concatenate_float8, exact_quotient, quantize_float8


def make(rows, columns, block, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    return Float8Weight(codes, torch.rand(grid, generator=generator) + 0.5, block)


def test_rows_are_those_of_the_whole_when_they_are_cut_inside_a_block():
    weight = make(70, 50, (16, 32))
    whole = weight.dequantize()
    for start, stop in ((0, 16), (16, 70), (5, 40), (33, 34)):
        assert torch.equal(weight.rows(start, stop).dequantize(), whole[start:stop])
    assert weight.rows(16, 70).block == (16, 32)
    assert weight.rows(5, 40).block == (1, 32)


def test_joined_weights_are_their_rows_one_after_the_other():
    aligned, odd, tensor = make(32, 64, (16, 32), 1), make(20, 64, (16, 32), 2), make(8, 64, (8, 64), 3)
    for parts in ([aligned, odd], [odd, aligned], [tensor, make(5, 64, (1, 1000), 4)]):
        joined = concatenate_float8(parts)
        assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert concatenate_float8([aligned, odd]).block == (16, 32)
    assert concatenate_float8([aligned, tensor]) is None


def test_a_row_is_quantised_by_its_largest_magnitude():
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(9, 40, generator=generator) * torch.logspace(-30, 30, 9)[:, None]
    weight[4] = 0
    found = quantize_float8(weight)
    error = (found.dequantize() - weight).abs()
    assert bool((error <= weight.abs() / 16 + weight.abs().amax(1, keepdim=True) / 448 / 512).all())
    assert found.codes.float().abs().amax(1).tolist() == [448.0 if row != 4 else 0.0 for row in range(9)]


def test_scales_are_those_of_the_cpu_where_a_number_divides_by_its_reciprocal(divides_like_cuda):
    weight = torch.randn(300, 40, generator=torch.Generator().manual_seed(3))
    expected = quantize_float8(weight)
    with divides_like_cuda():
        found = quantize_float8(weight)
        assert not torch.equal(weight / 448.0, exact_quotient(weight, 448.0))
    assert torch.equal(found.scale, expected.scale)
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(exact_quotient(weight, 448.0), weight / 448.0)


def test_a_row_that_is_not_finite_is_seen_to_be():
    weight = torch.ones(3, 4)
    weight[1, 2] = torch.inf
    found = quantize_float8(weight).dequantize()
    assert bool(torch.isnan(found[1]).all())
    assert torch.equal(found[[0, 2]], torch.ones(2, 4))
