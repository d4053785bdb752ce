"""Products of many tokens with 4-bit weights by the kernel for Hopper: in an emulation of Gluon, and on a GPU that runs it."""

import dataclasses

import pytest
import torch

from quire.kernels.triton import hopper_linear, hopper_linear_kernels
from quire.kernels.triton.hopper_attention import runs_on
from quire.kernels.triton.hopper_linear import many_tokens_launches
from quire.kernels.triton.launching import noted_launches
from quire.kernels.triton.linear import widen
from quire.kernels.triton.quantized_weights import FLOAT4_LEVELS, pack_float4, pack_float8, pack_integers
from quire.kernels.triton.tile_table import TileRule, TileTable, active_table, using
from quire.model.device_linear import DeviceLinear
from tests.unit.kernels.gpu.gluon_emulation import GluonEmulation

BF16 = torch.bfloat16


def table(is_specialized=True, tokens=64, num_stages=3):
    """Return the table in use, by which the kernel is chosen."""
    rule = TileRule({}, {"is_specialized": is_specialized, "tokens": tokens, "num_stages": num_stages})
    return TileTable("any", "9.0", {"linear-many": (rule,)}).over(active_table())


def weight_of(kind, num_rows, num_columns, group, seed=0):
    """Return a packed weight: of codes from -8 to 7, from 0 to 15 with offsets, or of floats; every code occurs."""
    generator = torch.Generator().manual_seed(seed)
    scale, offset = (torch.randn(num_rows, num_columns // group, generator=generator) + 2 for _ in range(2))
    codes = torch.randint(0, 16, (num_rows, num_columns), generator=generator, dtype=torch.int8)
    if kind == "floats":
        return pack_float4(torch.tensor((*FLOAT4_LEVELS, 0), dtype=torch.int8)[codes.long()], scale)
    if kind == "offsets":
        return pack_integers(codes, scale, offset, (0, 15))
    return pack_integers(codes - 8, scale, None, (-8, 7))


def on(device, weight):
    offsets = None if weight.offsets is None else weight.offsets.to(device)
    return dataclasses.replace(weight, codes=weight.codes.to(device), scales=weight.scales.to(device), offsets=offsets)


def inputs(num_tokens, num_columns, dtype=BF16):
    return torch.randn(num_tokens, num_columns, generator=torch.Generator().manual_seed(1)).to(dtype)


def run(x, weight, device, bias=None, **tile):
    """Return what the kernel writes, and its launches: on the GPU if it is one for which it is, else in the emulation."""
    place = device if runs_on(device) else torch.device("cpu")
    out = torch.full((len(x), weight.shape[0]), torch.nan, dtype=x.dtype, device=place)
    with using(table(**tile)):
        launches = many_tokens_launches(out, x.to(place), on(place, weight), None if bias is None else bias.to(place))
    for launch in launches:
        if runs_on(device):
            launch.run()
        elif launch.kernel.fn.__name__ == "add_splits":
            parts = launch.arguments["parts_ptr"]
            out.copy_(sum(parts) + (0 if bias is None else bias.float()))
        else:
            GluonEmulation(hopper_linear_kernels).run(launch)
    return out.cpu(), launches


@pytest.fixture
def on_hopper(monkeypatch):
    """Launches are made as for a GPU."""
    monkeypatch.setattr(hopper_linear, "runs_on", lambda device: True)


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["symmetric", "offsets", "floats"])
@pytest.mark.parametrize("group", [128, 64, 32, 256])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(70, 200), (129, 300), (65, 128)], ids=["ragged", "two-tiles", "whole-rows"])
@pytest.mark.parametrize("tile", [{}, {"tokens": 128, "num_stages": 2}, {"tokens": 256, "num_stages": 3}])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_weights_that_are_rounded_once(kind, group, dtype, shape, tile, has_bias, on_hopper, device):
    num_tokens, num_rows = shape
    weight, x = weight_of(kind, num_rows, 512, group), inputs(num_tokens, 512, dtype)
    bias = torch.linspace(-3, 3, num_rows).to(dtype) if has_bias else None
    found, _ = run(x, weight, device, bias, **tile)
    dense = widen(on(device, weight), dtype).cpu().double()
    expected = x.double() @ dense.T + (0 if bias is None else bias.double())
    assert (found.double() - expected).abs().max() <= (8e-3 if dtype == BF16 else 1e-3) * expected.abs().max()


def test_few_tiles_share_their_sums_and_many_are_computed_by_few_programs(on_hopper, device, monkeypatch):
    weight, x = weight_of("symmetric", 200, 1024, 128), inputs(150, 1024)
    bias = torch.linspace(-3, 3, 200).bfloat16()
    expected = x.double() @ widen(on(device, weight), BF16).cpu().double().T + bias.double()
    for num_multiprocessors, grid, count in ((132, 24, 2), (12, 12, 2), (11, 6, 1), (4, 4, 1)):
        traits = dataclasses.replace(hopper_linear.device_traits(), num_multiprocessors=num_multiprocessors)
        monkeypatch.setattr(hopper_linear, "device_traits", lambda traits=traits: traits)
        found, launches = run(x, weight, device, bias)
        assert (launches[0].grid, len(launches)) == ((grid,), count)
        assert (found.double() - expected).abs().max() <= 8e-3 * expected.abs().max()


def test_it_is_used_only_where_the_table_says_so_and_it_computes_such_products(on_hopper):
    weight, x = weight_of("symmetric", 64, 256, 64), inputs(65, 256)
    out = torch.empty(65, 64, dtype=BF16)
    with using(table(is_specialized=False)):
        assert many_tokens_launches(out, x, weight) is None
    with using(table()):
        assert many_tokens_launches(out, x, weight) is not None
        bytes = pack_integers(torch.ones(64, 256, dtype=torch.int8), torch.ones(64, 2), limits=(-128, 127))
        for other in (bytes, pack_float8(torch.ones(64, 256).to(torch.float8_e4m3fn), torch.ones(1, 2), (64, 128))):
            assert many_tokens_launches(out, x, other) is None
        assert many_tokens_launches(out[:64], x[:64], weight) is None
        assert many_tokens_launches(out, inputs(65, 512)[:, :256], weight) is None
        assert many_tokens_launches(out.float(), x.float(), weight) is None
        assert many_tokens_launches(out, inputs(65, 128), weight_of("symmetric", 64, 128, 128)) is None


def test_a_layer_uses_it_for_many_tokens_and_not_in_deterministic_steps(on_hopper, device):
    weight = on(device, weight_of("symmetric", 64, 256, 64))
    seen = {}
    for is_in_order in (False, True):
        for count in (64, 65, 300):
            with using(table()), noted_launches() as launches:
                DeviceLinear((weight,), None, is_in_order)(inputs(count, 256).to(device))
            seen[is_in_order, count] = [launch.kernel.fn.__name__ for launch in launches][:1] == ["multiply_dequantised"]
    assert [key for key, is_used in seen.items() if is_used] == [(False, 65), (False, 300)]


def test_the_shipped_table_does_not_choose_it(on_hopper):
    x = inputs(300, 256)
    assert many_tokens_launches(torch.empty(300, 64, dtype=BF16), x, weight_of("symmetric", 64, 256, 64)) is None
