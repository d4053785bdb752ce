"""The quantised KV formats in torch: rotation, levels and errors."""

import pytest
import torch

from quire.contracts.kv_spec import KvSpec
from quire.kernels.reference.kv_formats import (
    KV_CODES,
    LEVELS,
    dequantize,
    quantize,
    rotate,
    rotation_signs,
    unrotate,
)

DIMS = [2, 6, 16, 18, 64, 80, 96, 128, 256, 576]


def vectors(dim, seed=0):
    return torch.randn(500, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", DIMS)
def test_a_rotation_keeps_inner_products_and_is_undone(dim):
    x, y = vectors(dim).double(), vectors(dim, 1).double()
    assert torch.allclose(rotate(x) @ rotate(y).T, x @ y.T, atol=1e-10)
    assert torch.allclose(unrotate(rotate(x)), x, atol=1e-12)


def test_a_rotation_spreads_one_large_value_over_all():
    x = torch.zeros(128)
    x[17] = 8.0
    assert torch.allclose(rotate(x).abs(), torch.full((128,), 8 / 128**0.5))


def test_signs_are_fixed():
    # Pages of the cache are kept on disk: other signs would read other keys from them.
    assert rotation_signs(16).tolist() == [1, -1, 1, 1, -1, 1, 1, -1, -1, 1, 1, 1, -1, 1, -1, -1]
    assert torch.equal(rotation_signs(2048)[:16], rotation_signs(16))
    assert abs(rotation_signs(2048).sum()) < 150


def test_levels_are_symmetric_and_exact_in_bfloat16():
    levels = torch.tensor(LEVELS)
    assert torch.equal(levels, levels.bfloat16().float())
    assert torch.equal(levels, -levels.flip(0))
    assert (levels.diff() > 0).all()


def test_the_error_of_sixteen_levels_is_near_the_least_possible_for_a_normal_distribution():
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    nearest = torch.tensor(LEVELS)[(x[:, None] - torch.tensor(LEVELS)).abs().argmin(-1)]
    assert 0.0093 < (x - nearest).square().mean() < 0.0100  # Lloyd and Max: 0.0095


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_errors_stay_when_some_values_are_large(dim):
    x = vectors(dim)
    x[:, 3] *= 30  # as keys of some models have
    codes, scales = quantize(x, "rotated4")
    restored = dequantize(codes, scales, "rotated4")
    assert codes.dtype == torch.uint8
    assert codes.max() <= 15
    # The scale has the least squared error: what is lost is orthogonal to what is kept.
    assert torch.allclose((restored * (x - restored)).sum(-1) / x.square().sum(-1), torch.zeros(500), atol=1e-5)
    relative = ((restored - x).square().sum(-1) / x.square().sum(-1)).mean()
    assert relative < 0.0125
    # Errors of scores do not add up over the tokens.
    q = vectors(dim, 5)
    difference = (restored @ q.T - x @ q.T) / (x.norm(dim=-1)[:, None] * q.norm(dim=-1))
    assert difference.mean().abs() < 1e-3


@pytest.mark.parametrize("code", ["int8", "fp8", "rotated4"])
def test_zeros_and_what_is_not_finite(code):
    x = vectors(64)[:5]
    x[0] = 0
    x[1, 7] = torch.nan
    x[2, 7] = torch.inf
    x[3] *= 1e37
    codes, scales = quantize(x, code)
    restored = dequantize(codes, scales, code)
    assert scales[0] == 0
    assert (restored[0] == 0).all()
    assert not scales[1:3].isfinite().any()
    assert restored[3:].isfinite().all()


def test_int8_errs_by_half_a_step():
    x = vectors(64)
    codes, scales = quantize(x, "int8")
    assert ((dequantize(codes, scales, "int8") - x).abs() <= scales[:, None] * 0.5001).all()


def test_fp8_errs_by_a_part_in_sixteen_or_half_a_step_of_the_least_exponent():
    x = vectors(64)
    codes, scales = quantize(x, "fp8")
    error = (dequantize(codes, scales, "fp8") - x).abs()
    assert codes.dtype == torch.float8_e4m3fn
    assert (codes.float().abs().amax(-1) == 448).all()
    assert (error <= torch.maximum(x.abs() / 16, scales[:, None] * 2.0**-10) * 1.0001).all()


@pytest.mark.parametrize(("dtype", "ratio"), [("int8", 1.93), ("fp8", 1.93), ("k8v4", 2.56), ("turboquant_4bit", 3.7)])
def test_so_many_times_the_tokens_of_bfloat16_fit_at_head_size_128(dtype, ratio):
    shapes = ((8, 128),) * 4
    assert KvSpec(16, "bfloat16", shapes).bytes_per_token / KvSpec(16, dtype, shapes).bytes_per_token >= ratio
    assert dtype in KV_CODES
