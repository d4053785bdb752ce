"""Linear layers in float8 throughout against float64."""

import numpy as np
import pytest
import torch

from quire.base.errors import InvariantError
from quire.kernels.triton import float8
from quire.kernels.triton.device_traits import HOPPER, using_traits
from quire.kernels.triton.float8 import float8_launches, multiply_float8, quantize, suits_float8
from quire.kernels.triton.launching import collected_launches, run_all
from quire.kernels.triton.linear import multiply
from quire.kernels.triton.quantized_weights import DeviceQuantizedWeight, pack_float8, pack_integers
from quire.kernels.triton.tile_table import TileRule, TileTable, using
from quire.model.device_linear import DeviceLinear
from tests.unit.kernels.gpu.conftest import HAS_GPU, draw

FP8 = torch.float8_e4m3fn
F32_TOLERANCE = 1e-3 if HAS_GPU else 2e-5
"""Of the largest sum: Hopper's tensor core for float8 adds with about 14 bits, and lost up to 2.5e-4 of it."""


def spread(values, group_size):
    """Return values [R, G] as [R, G * group_size]."""
    return values.double().repeat_interleave(group_size, 1)


def make_weight(num_rows, num_columns, block, device, seed=0):
    """Return a weight on the device, and the same dense in float64."""
    generator = torch.Generator().manual_seed(seed)
    codes = (20 * torch.randn(num_rows, num_columns, generator=generator)).to(FP8)
    width = min(block[1], num_columns)
    scale = torch.rand(-(-num_rows // block[0]), num_columns // width, generator=generator) + 0.1
    dense = codes.double() * spread(scale, width)[torch.arange(num_rows) // block[0]]
    weight = pack_float8(codes, scale, block)
    rest = weight.group_size, weight.scale_rows, weight.run, weight.base
    return DeviceQuantizedWeight(codes.to(device), scale.to(device), None, *rest), dense


@pytest.mark.covering
@pytest.mark.parametrize("group_size, num_columns", [(128, 384), (96, 192), (300, 300), (1, 5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_are_rounded_by_the_largest_value_of_each_group(group_size, num_columns, dtype, device):
    x = 5 * draw(7, num_columns, seed=1, dtype=dtype)
    x[2] = 0
    codes, scales = (part.cpu() for part in quantize(x.to(device), group_size))
    sizes = x.float().view(7, -1, group_size).abs().amax(-1)
    torch.testing.assert_close(scales, sizes / 448)
    back = codes.double() * spread(scales, group_size)
    # Half a step: of three bits of fraction, or of the smallest numbers.
    assert ((back - x.double()).abs() <= x.double().abs() / 16 * 1.001 + spread(scales, group_size) / 1024).all()
    assert back[2].eq(0).all()


@pytest.mark.covering
@pytest.mark.parametrize(
    "shape, block", [((100, 192), (64, 64)), ((130, 300), (1, 300)), ((70, 256), (1000, 1000)), ((33, 384), (128, 128))],
    ids=["blocks", "rows", "tensor", "wide"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
def test_products_are_those_of_the_rounded_rows(shape, block, dtype, device):
    weight, dense = make_weight(*shape, block, device)
    x = draw(67, shape[1], seed=1, dtype=dtype)
    bias = torch.linspace(-3, 3, shape[0]).to(dtype)
    codes, scales = (part.cpu() for part in quantize(x.to(device), weight.group_size))
    rounded = codes.double() * spread(scales, weight.group_size)[:, : shape[1]]
    expected = rounded @ dense.T + bias.double()
    found = multiply_float8(x.to(device), weight, bias.to(device)).cpu()
    assert found.dtype == dtype
    tolerance = F32_TOLERANCE if dtype == torch.float32 else 8e-3
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()
    plain = x.double() @ dense.T + bias.double()
    assert (found.double() - plain).norm() <= 0.04 * plain.norm()


@pytest.mark.parametrize("tile", [(256, 16), (64, 16)], ids=["rows in two parts", "sums in two parts"])
def test_products_of_wide_tiles_and_of_parts_of_sums_are_those_of_the_rounded_rows(tile, device):
    shape = (300, 256) if tile[0] == 256 else (20, 2048)  # few rows and many columns: two programs share a sum
    rules = {"float8": (TileRule({}, {"rows": tile[0], "tokens": tile[1], "num_warps": 4, "num_stages": 3}),)}
    weight, dense = make_weight(*shape, (128, 128), device)
    x, bias = draw(9, shape[1], seed=1, dtype=torch.bfloat16), torch.linspace(-3, 3, shape[0])
    codes, scales = (part.cpu() for part in quantize(x.to(device), 128))
    expected = codes.double() * spread(scales, 128) @ dense.T + bias.double()
    with using(TileTable("d", "9.0", rules)):
        out = torch.empty(9, shape[0], dtype=torch.bfloat16, device=device)
        launches = float8_launches(out, x.to(device), weight, bias.to(device))
        run_all(launches)
    assert len(launches) == (2 if tile[0] == 256 else 3)
    assert (out.cpu().double() - expected).abs().max() <= 8e-3 * expected.abs().max()


def rounded_sums(a, b, d, make_handle):
    """Return a product of tiles as Hopper's tensor core forms it: parts of a sum lose all bits 13 below the largest of them."""
    products = a.data.astype(np.float64)[:, :, None] * b.data.astype(np.float64)[None]
    total = d.data.astype(np.float64)
    for first in range(0, products.shape[1], 32):
        parts = np.concatenate([products[:, first : first + 32], total[:, None]], 1)
        unit = 2.0 ** (np.frexp(np.abs(parts).max(1, keepdims=True))[1] - 14)
        total = (np.trunc(parts / unit) * unit).sum(1)
    return make_handle(total.astype(np.float32), d.dtype.scalar)


@pytest.mark.skipif(HAS_GPU, reason="a GPU has its own sums")
def test_the_bound_on_a_gpu_holds_where_sums_have_as_few_bits_as_there(monkeypatch, device):
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda builder, a, b, d, *_: rounded_sums(a, b, d, TensorHandle))
    weight, dense = make_weight(20, 384, (128, 128), device)
    x = draw(9, 384, seed=1)
    codes, scales = quantize(x, weight.group_size)
    expected = codes.double() * spread(scales, weight.group_size) @ dense.T
    error = (multiply_float8(x, weight).double() - expected).abs().max() / expected.abs().max()
    assert 2e-5 < error < 1e-3


def test_rows_with_values_far_out_leave_the_others_as_they_are(device):
    weight, _ = make_weight(40, 256, (128, 128), device)
    x = draw(66, 256, seed=1, dtype=torch.bfloat16)
    x[3] *= 1e30
    x[4, 7], x[5, 200] = torch.nan, torch.inf
    found = multiply_float8(x.to(device), weight).cpu()
    alone = multiply_float8(x[10:11].to(device), weight).cpu()
    assert torch.equal(alone, found[10:11])
    assert found[4:6].isnan().all()
    assert not found[6:].isnan().any()
    assert not found[:3].isnan().any()


def test_float8_is_preferred_for_many_tokens_and_float8_weights_alone(device):
    weight, _ = make_weight(40, 256, (128, 128), device)
    integers = pack_integers(torch.ones(4, 64, dtype=torch.int8), torch.ones(4, 1))
    x = torch.empty(float8.FLOAT8_FROM, 256, dtype=torch.bfloat16)
    assert suits_float8(x, weight)
    assert not suits_float8(x[1:], weight)
    assert not suits_float8(x.float(), weight)
    assert not suits_float8(x, integers)
    with pytest.raises(InvariantError, match="float8 products take weights"):
        multiply_float8(torch.ones(2, 64), integers)


def test_the_library_gets_operands_and_scales_that_it_takes(monkeypatch):
    monkeypatch.setattr(float8, "_fits_library", lambda x, weight: True)
    monkeypatch.setattr(
        float8, "quantize", lambda x, group: float8.Float8Rows(x.to(FP8), torch.ones(len(x), 1, device=x.device))
    )
    for block in ((1, 64), (1000, 1000)):
        weight, _ = make_weight(48, 64, block, "meta")
        found = multiply_float8(torch.empty(80, 64, dtype=torch.bfloat16, device="meta"), weight)
        assert (found.shape, found.dtype) == ((80, 48), torch.bfloat16)


@pytest.mark.parametrize(("cuda", "is_own"), [("12.8", True), ("12.9", False), ("13.0", False), (None, False)])
def test_what_is_compiled_ahead_are_the_products_that_the_cuda_of_torch_lacks(cuda, is_own, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    float8.multiplies_blocks.cache_clear()
    weight, _ = make_weight(128, 512, (128, 128), "meta")
    x = torch.empty(float8.LIBRARY_FROM, 512, dtype=torch.bfloat16, device="meta")
    with using_traits(HOPPER), collected_launches() as launches:
        multiply_float8(x, weight)
    float8.multiplies_blocks.cache_clear()
    assert ("multiply_quantized" in [launch.kernel.fn.__name__ for launch in launches]) == is_own


def test_layers_round_activations_when_there_are_many_unless_sums_have_an_order(device):
    weight, _ = make_weight(64, 256, (128, 128), device)
    x = draw(float8.FLOAT8_FROM, 256, seed=1, dtype=torch.bfloat16).to(device)
    layer = DeviceLinear((weight,))
    assert torch.equal(layer(x), multiply_float8(x, weight))
    assert torch.equal(layer(x[1:]), multiply(x[1:], weight))
    assert torch.equal(DeviceLinear((weight,), is_in_order=True)(x), multiply(x, weight))
