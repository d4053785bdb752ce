"""Quantising one weight: what the codes and scales are, against plain loops, and how much of the weight is lost."""

import pytest
import torch

from quire.base.errors import ConfigError
from quire.quant.float8 import exact_quotient
from quire.quant.quantize import (
    FINE_INT4,
    INT4,
    INT8,
    LINEAR_LEVELS,
    NONLINEAR_LEVELS,
    Scheme,
    fit_scheme,
    quantize_weight,
    round_scales,
    sqnr_db,
)

SCHEMES = [Scheme(kind, size) for kind in ("linear", "nonlinear", "affine") for size in (32, 64, 128)] + [INT8]
LEVELS = {"linear": LINEAR_LEVELS, "nonlinear": NONLINEAR_LEVELS, "affine": tuple(range(16))}


def name_of(scheme):
    return scheme.kind if scheme == INT8 else f"{scheme.kind}-{scheme.group_size}"


def random_weight(num_rows, num_columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(num_rows, 1, generator=generator).exp()
    return torch.randn(num_rows, num_columns, generator=generator) * spread


def groups_of(weight, quantized):
    """Yield (group of the weight, its codes, scale, offset)."""
    size = quantized.group_size
    for row in range(weight.shape[0]):
        for group in range(quantized.scale.shape[1]):
            columns = slice(group * size, (group + 1) * size)
            offset = 0.0 if quantized.offset is None else float(quantized.offset[row, group])
            yield weight[row, columns], quantized.codes[row, columns], float(quantized.scale[row, group]), offset


def least_error(group, levels, num_scales=2000):
    """Return the smallest squared error of a group over a dense scan of scales, each with nearest levels."""
    levels = torch.tensor(levels, dtype=torch.float64)
    tried = torch.arange(num_scales, dtype=torch.float64) / num_scales * 1.2 + 0.6
    scales = torch.cat((tried, -tried)) * float(group.abs().max()) / float(levels.abs().max())
    distances = (group.double()[:, None] - scales[:, None, None] * levels).abs().amin(dim=2)
    return float(distances.square().sum(dim=1).min())


def test_int8_is_the_row_over_its_largest_magnitude():
    weight = random_weight(5, 40)
    quantized = quantize_weight(weight, INT8)
    assert quantized.levels is None
    for row in range(5):
        scale = max(abs(float(x)) for x in weight[row]) / 127
        assert float(quantized.scale[row, 0]) == pytest.approx(scale, rel=1e-6)
        assert quantized.codes[row].tolist() == [round(float(x) / scale) for x in weight[row]]


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_every_code_is_the_nearest_level_of_its_group(scheme):
    weight = random_weight(6, 128)
    quantized = quantize_weight(weight, scheme)
    levels = torch.tensor(LEVELS.get(scheme.kind, range(-127, 128)), dtype=torch.float64)
    assert quantized.levels == LEVELS.get(scheme.kind)
    for group, codes, scale, offset in groups_of(weight, quantized):
        error = (group.double() - offset - scale * codes.double()).abs()
        least = (group.double()[:, None] - offset - scale * levels).abs().amin(dim=1)
        assert torch.allclose(error, least, rtol=0, atol=1e-5 * abs(scale))


@pytest.mark.parametrize("kind, slack", [("linear", 1.10), ("nonlinear", 1.10)])
def test_error_is_close_to_the_least_when_every_scale_is_tried(kind, slack):
    weight = random_weight(4, 128, seed=3)
    quantized = quantize_weight(weight, Scheme(kind))
    error = sum(float((g - s * c).square().sum()) for g, c, s, _ in groups_of(weight, quantized))
    least = sum(least_error(g, LEVELS[kind]) for g, _, _, _ in groups_of(weight, quantized))
    assert least * 0.999 <= error <= slack * least


@pytest.mark.parametrize(
    "scheme, decibels",
    [
        (INT8, 40.5),
        (INT4, 20.6),
        (Scheme("nonlinear", 64), 21.1),
        (FINE_INT4, 21.8),
        (Scheme("linear"), 21.0),
        (Scheme("affine"), 21.8),
        (Scheme("affine", 64), 20.4),
    ],
    ids=lambda value: name_of(value) if isinstance(value, Scheme) else str(value),
)
def test_signal_to_noise_of_normal_weights_has_its_floor(scheme, decibels):
    weight = random_weight(64, 512)
    found = sqnr_db(weight, quantize_weight(weight, scheme))
    noise = (weight - quantize_weight(weight, scheme).dequantize()).double().square().sum()
    assert found == pytest.approx(float(10 * torch.log10(weight.double().square().sum() / noise)), abs=1e-3)
    assert decibels < found < decibels + 3


def test_nonlinear_levels_are_the_best_of_four_and_a_half_bits():
    weight = random_weight(64, 512, seed=1)
    best = sqnr_db(weight, quantize_weight(weight, FINE_INT4))
    assert best > sqnr_db(weight, quantize_weight(weight, Scheme("linear"))) + 0.5
    assert best > sqnr_db(weight, quantize_weight(weight, Scheme("affine", 64))) + 0.5


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_zeros_and_equal_weights_are_exact_and_tiny_and_huge_ones_are_finite(scheme):
    weight = torch.zeros(4, 128)
    weight[1] = 0.75
    weight[2], weight[3] = torch.randn(2, 128, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-12], [1e12]])
    dense = quantize_weight(weight, scheme).dequantize()
    assert torch.equal(dense[0], weight[0])
    assert torch.allclose(dense[1], weight[1], rtol=1e-3)
    for row in (2, 3):
        unit = float(weight[row].abs().max())
        assert float(((dense[row] - weight[row]) / unit).square().sum()) < 0.05 * float((weight[row] / unit).square().sum())


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_rows_are_independent_when_the_weight_is_worked_on_in_chunks(scheme, monkeypatch):
    weight = random_weight(7, 128)
    whole = quantize_weight(weight, scheme)
    monkeypatch.setattr("quire.quant.quantize._CHUNK_WEIGHTS", 2 * 128)
    chunked = quantize_weight(weight, scheme)
    assert torch.equal(whole.codes, chunked.codes)
    assert torch.equal(whole.scale, chunked.scale)


def test_half_precision_weights_give_what_their_f32_values_give():
    weight = random_weight(4, 256).bfloat16()
    assert torch.equal(quantize_weight(weight, INT4).codes, quantize_weight(weight.float(), INT4).codes)


def test_scales_are_shares_in_f16_of_the_largest_of_their_row():
    scale = torch.randn(50, 24, generator=torch.Generator().manual_seed(0))
    scale[3] = 0.0
    scale[4, 1:] *= 1e-5
    rounded = round_scales(scale)
    largest = scale.abs().amax(dim=1, keepdim=True)
    assert torch.equal(rounded.abs().amax(dim=1, keepdim=True), largest)
    assert torch.equal(round_scales(rounded), rounded)
    share = (rounded / largest).nan_to_num()
    assert torch.allclose(share.half().float(), share, rtol=1e-6, atol=0)
    normal = (scale / largest).abs().nan_to_num() > 2**-14
    assert float(((rounded - scale) / scale)[normal].abs().max()) <= 2**-11 * 1.001


def test_scales_are_representable_when_a_dtype_is_given():
    quantized = quantize_weight(random_weight(4, 64), Scheme("linear"), scale_dtype=torch.bfloat16)
    assert torch.equal(quantized.scale.bfloat16().float(), quantized.scale)


@pytest.mark.parametrize(
    "kind, size, num_columns, expected",
    [
        ("nonlinear", 32, 96, Scheme("nonlinear", 32)),
        ("nonlinear", 128, 192, Scheme("nonlinear", 64)),
        ("linear", 64, 96, Scheme("linear", 32)),
        ("linear", 128, 256, Scheme("linear", 128)),
        ("nonlinear", 32, 172, INT8),
        ("int8", 32, 33, INT8),
        ("int8", 32, 31, None),
        ("nonlinear", 32, 24, None),
    ],
)
def test_scheme_fits_the_columns(kind, size, num_columns, expected):
    assert fit_scheme(Scheme(kind, size), num_columns) == expected


def test_other_group_sizes_are_refused():
    with pytest.raises(ConfigError, match="48"):
        Scheme("linear", 48)


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_codes_and_scales_are_those_of_the_cpu_where_a_number_divides_by_its_reciprocal(scheme, monkeypatch, divides_like_cuda):
    monkeypatch.setattr("quire.quant.quantize.load_native", lambda: None)
    weight = random_weight(200, 128)
    expected = quantize_weight(weight, scheme, torch.float32)
    with divides_like_cuda():
        found = quantize_weight(weight, scheme, torch.float32)
        assert not torch.equal(weight / 127, exact_quotient(weight, 127))
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scale, expected.scale)
    assert scheme.kind != "affine" or torch.equal(found.offset, expected.offset)
