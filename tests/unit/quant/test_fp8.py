"""float8 weights: blocks with ragged edges, one scale per tensor or row, and values that cannot be."""

import numpy as np
import pytest
import torch

from quire.base.errors import ModelFormatError
from quire.quant.config import Fp8Config
from quire.quant.readers import gather_weights


def _weight(block=None, **parts):
    return gather_weights({f"m.{part}": tensor for part, tensor in parts.items()}, Fp8Config(block))["m.weight"]


def _decode(codes):
    """Return the values of e4m3 codes by their definition: bias 7, no infinity."""
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    return np.where(codes & 128, -size, size).astype(np.float32)


def test_every_code_is_its_value():
    codes = np.array([code for code in range(256) if code & 127 != 127], np.uint8).reshape(2, 127)
    stored = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    got = _weight(weight=stored, weight_scale=torch.tensor(0.5)).load()
    assert torch.equal(got, torch.from_numpy(_decode(codes.astype(int)) * np.float32(0.5)))


@pytest.mark.parametrize("rows, columns", [(32, 48), (33, 50), (7, 5), (16, 17)])
@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
def test_scales_multiply_blocks_when_edges_are_ragged(rows, columns, name):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // 16), -(-columns // 16), generator=generator)
    stored = _weight((16, 16), **{"weight": weight, name: scale})
    assert stored.shape == (rows, columns)
    expected = weight.float().clone()
    for row in range(rows):
        for column in range(columns):
            expected[row, column] *= scale[row // 16, column // 16]
    assert torch.equal(stored.load(), expected)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (6, 1), (6,)], ids=str)
def test_scale_may_be_of_the_tensor_or_of_rows(shape):
    generator = torch.Generator().manual_seed(0)
    weight, scale = torch.randn(6, 8, generator=generator).to(torch.float8_e4m3fn), torch.rand(shape, generator=generator)
    got = _weight(weight=weight, weight_scale=scale, input_scale=torch.ones(1)).load()
    assert torch.equal(got, weight.float() * (scale.view(6, 1) if scale.numel() == 6 else scale.view(1, 1)))


def test_scales_may_be_powers_of_two_in_a_byte():
    scale = torch.tensor([[126, 129]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    got = _weight((4, 4), weight=torch.ones(4, 8).to(torch.float8_e4m3fn), weight_scale_inv=scale).load()
    assert torch.equal(got, torch.tensor([0.5] * 4 + [4.0] * 4).expand(4, 8))


_ONES = torch.ones(32, 48).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "block, parts, message",
    [
        ((16, 16), {"weight": _ONES, "weight_scale_inv": torch.ones(2, 2)}, r"inv has \[2, 2\] .* expected .* \[2, 3\]"),
        ((16, 16), {"weight": _ONES, "weight_scale_inv": torch.ones(3, 2)}, r"inv has \[3, 2\] .* expected .* \[2, 3\]"),
        ((16, 16), {"weight": _ONES.view(torch.int8), "weight_scale_inv": torch.ones(2, 3)}, r"m\.weight has .* torch\.int8"),
        ((16, 16), {"weight_scale_inv": torch.ones(2, 3)}, r"m\.weight is missing"),
        (None, {"weight": _ONES, "weight_scale": torch.ones(3)}, r"m\.weight_scale has \[3\]"),
        (None, {"weight": _ONES, "weight_scale": torch.ones(1, dtype=torch.int32)}, r"m\.weight_scale has .* torch\.int32"),
        (None, {"weight": _ONES, "weight_scale": torch.ones(1), "weight_scale_inv": torch.ones(1)}, r"expected one of them"),
        (None, {"weight": _ONES[:0], "weight_scale": torch.ones(1)}, r"m\.weight has \[0, 48\]"),
    ],
)
def test_weight_is_refused_unread_when_its_parts_do_not_fit(block, parts, message):
    with pytest.raises(ModelFormatError, match=message):
        _weight(block, **parts)


def test_weight_is_refused_when_a_value_is_not_a_number():
    broken = torch.zeros(4, 4, dtype=torch.uint8)
    broken[1, 2] = 0xFF
    with pytest.raises(ModelFormatError, match=r"m\.weight holds codes that are not numbers"):
        _weight(weight=broken.view(torch.float8_e4m3fn), weight_scale=torch.ones(1)).load()
    with pytest.raises(ModelFormatError, match=r"m\.weight_scale holds values that are not finite"):
        _weight(weight=torch.ones(4, 4).to(torch.float8_e4m3fn), weight_scale=torch.tensor(float("inf"))).load()


def test_memory_stays_small_when_a_block_is_far_larger_than_the_weight():
    scale = torch.full((1, 1), 2.0)
    got = _weight((1 << 16, 1 << 16), weight=torch.ones(1, 4).to(torch.float8_e4m3fn), weight_scale_inv=scale).load()
    assert torch.equal(got, torch.full((1, 4), 2.0))
