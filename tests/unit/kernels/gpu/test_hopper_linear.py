"""Products of many tokens with 4-bit weights by the kernel for Hopper: in an emulation of Gluon, and on a GPU that runs it."""

import dataclasses

import pytest
import torch

from quire.base.errors import ConfigError
from quire.kernels.triton import hopper_linear, hopper_linear_kernels
from quire.kernels.triton.hopper_attention import runs_on
from quire.kernels.triton.hopper_linear import large_batch_launches, tile_of
from quire.kernels.triton.launching import collected_launches
from quire.kernels.triton.quantized_weights import FLOAT4_LEVELS, pack_float4, pack_integers
from quire.kernels.triton.tile_table import TileRule, TileTable, active_table, using
from quire.kernels.triton.tiles import LargeBatchTile
from quire.model.device_linear import DeviceLinear
from tests.unit.kernels.gpu.conftest import draw
from tests.unit.kernels.gpu.gluon_emulation import GluonEmulation
from tests.unit.kernels.gpu.test_triton_linear import on

BF16 = torch.bfloat16
RULE = TileRule({}, {"is_specialized": True, "tokens": 64, "num_stages": 3})
CHOOSING = TileTable("any", "9.0", {"linear-large-batch": (RULE,)}).over(active_table())
ONE_STAGE = TileTable("any", "9.0", {"linear-large-batch": (TileRule({}, {**RULE.tile, "num_stages": 1}),)})


def weight_of(kind, num_rows, num_columns, group):
    """Return a packed weight, of codes from -8 to 7, from 0 to 15 with offsets, or of floats, and the same dense, f32."""
    generator = torch.Generator().manual_seed(0)
    scale, offset = (torch.randn(num_rows, num_columns // group, generator=generator) + 2 for _ in range(2))
    codes = torch.randint(0, 16, (num_rows, num_columns), generator=generator, dtype=torch.int8)
    if kind == "symmetric":
        codes -= 8
    if kind == "floats":
        codes = torch.tensor((*FLOAT4_LEVELS, 0), dtype=torch.int8)[codes.long()]
    dense = codes * scale.repeat_interleave(group, 1)
    if kind == "floats":
        return pack_float4(codes, scale), dense
    if kind == "offsets":
        return pack_integers(codes, scale, offset, (0, 15)), dense + offset.repeat_interleave(group, 1)
    return pack_integers(codes, scale, None, (-8, 7)), dense


def inputs(num_tokens, num_columns, dtype=BF16):
    return draw(num_tokens, num_columns, seed=1, dtype=dtype)


def check(x, weight_and_dense, device, tile=(64, 3), bias=None):
    """Compare what the kernel writes with a product in float64 by rounded weights, and return its launches."""
    weight, dense = weight_and_dense
    place = device if runs_on(device) else torch.device("cpu")
    out = torch.full((len(x), weight.shape[0]), torch.nan, dtype=x.dtype, device=place)
    moved = None if bias is None else bias.to(place)
    launches = large_batch_launches(out, x.to(place), on(place, weight), LargeBatchTile(*tile), moved)
    for launch in launches:
        if runs_on(device):
            launch.run()
        elif launch.kernel.fn.__name__ == "add_splits":
            out.copy_(sum(launch.arguments["parts_ptr"]) + (0 if bias is None else bias.float()))
        else:
            GluonEmulation(hopper_linear_kernels).run(launch)
    expected = x.double() @ dense.to(x.dtype).double().T + (0 if bias is None else bias.double())
    assert (out.cpu().double() - expected).abs().max() <= (8e-3 if x.dtype == BF16 else 1e-3) * expected.abs().max()
    return launches


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["symmetric", "offsets", "floats"])
@pytest.mark.parametrize("group", [128, 64, 32, 256])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens, num_rows", [(70, 200), (129, 300), (65, 128)])
@pytest.mark.parametrize("tile", [(64, 3), (128, 2), (256, 3)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_weights_that_are_rounded_once(kind, group, dtype, num_tokens, num_rows, tile, has_bias, device):
    bias = torch.linspace(-3, 3, num_rows).to(dtype) if has_bias else None
    check(inputs(num_tokens, 512, dtype), weight_of(kind, num_rows, 512, group), device, tile, bias)


@pytest.mark.parametrize("num_multiprocessors, grid, num_launches", [(132, 12, 2), (4, 4, 1)])
def test_few_tiles_share_their_sums_and_few_programs_compute_many(num_multiprocessors, grid, num_launches, monkeypatch, device):
    traits = dataclasses.replace(hopper_linear.device_traits(), num_multiprocessors=num_multiprocessors)
    monkeypatch.setattr(hopper_linear, "device_traits", lambda: traits)
    launches = check(
        inputs(150, 512), weight_of("symmetric", 200, 512, 128), device, bias=torch.linspace(-3, 3, 200).bfloat16()
    )
    assert (launches[0].grid, len(launches)) == ((grid,), num_launches)


def test_it_is_used_only_where_the_table_says_so_and_it_computes_such_products(monkeypatch, device):
    monkeypatch.setattr(hopper_linear, "runs_on", lambda device: True)
    (weight, _), x = weight_of("symmetric", 64, 256, 64), inputs(300, 256)
    assert tile_of(x, weight) is None  # in the shipped table: it has not run on a GPU
    bytes = pack_integers(torch.ones(64, 256, dtype=torch.int8), torch.ones(64, 2), limits=(-128, 127))
    with using(ONE_STAGE), pytest.raises(ConfigError, match="num_stages of linear-large-batch is 1"):
        tile_of(x, weight)
    with using(CHOOSING):
        assert tile_of(x[:65], weight) == LargeBatchTile(64, 3)
        for others in ((x[:64], weight), (x.float(), weight), (inputs(65, 512)[:, :256], weight), (x, bytes)):
            assert tile_of(*others) is None
        assert tile_of(inputs(65, 128), weight_of("symmetric", 64, 128, 128)[0]) is None
        for is_in_order in (False, True):
            with collected_launches() as launches:
                DeviceLinear((on(device, weight),), None, is_in_order)(x.to(device))
            assert (launches[0].kernel.fn.__name__ == "multiply_dequantised") is not is_in_order
