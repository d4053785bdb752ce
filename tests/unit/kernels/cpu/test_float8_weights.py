"""Weights of float8 on every instruction set of this machine: exact codes, and results within their roundings of f64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.kernels.cpu.packed_layers import SMALLEST, UNIT, make_inputs, pad_rows, to_panels

native = pytest.importorskip("quire.kernels.cpu._native", reason="the native kernels are not built")
if not hasattr(native, "linear"):
    pytest.skip("built without the linear component", allow_module_level=True)

ISAS = native.supported_isas()
STORE, ADD, GATE, ACTIVATE, MULTIPLY, BEST = range(6)
# (n, k, block): a block for each row, whole, and that end short.
SHAPES = [(1, 4, 0), (15, 8, 4), (16, 12, 8), (17, 128, 128), (33, 260, 128), (130, 132, 0), (70, 384, 128), (37, 300, 24)]
# One tile of each width, its limits, and several passes.
ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 16, 17, 28, 29, 70)
NOT_NUMBERS = (0x7F, 0xFF)


@dataclass(frozen=True)
class Float8Layer:
    native: object
    weights: Tensor  # [N, K] f64, what is packed
    bias: Tensor | None
    blocks: int
    is_wide: bool

    def apply(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return y [M, N] f64 for x [M, K] f32, and how far from it a kernel may be.

        Inputs are rounded to bf16 unless it is wide. Products with codes are exact beside bf16; there is a rounding per product
        and sum, and two per block for its scale.
        """
        values = x.double() if self.is_wide else x.bfloat16().double()
        y, sizes = values @ self.weights.T, values.abs() @ self.weights.abs().T
        error = 2 * (x.shape[1] + 1 + 2 * self.blocks) * UNIT * sizes
        # What is below the normal numbers counts as 0: inputs, products with codes (by the scale), and results.
        scales = self.weights.abs().sum(1) + self.weights.abs().amax(1) * 2**10 * x.shape[1]
        lost = SMALLEST * (x.shape[1] + scales)
        y = y if self.bias is None else y + self.bias
        bias = 0 if self.bias is None else self.bias.abs()
        return y, error + lost + 2 * UNIT * (y.abs() + bias) + SMALLEST


def random_codes(n: int, k: int, seed: int = 0) -> Tensor:
    """Return codes [n, k] as bytes, every number among them where there is room."""
    codes = torch.randint(0, 256, (n, k), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 3
    return codes


def make_layer(n, k, block=0, *, is_wide=False, has_bias=False, seed=0, threads=1, codes=None) -> Float8Layer:
    codes = random_codes(n, k, seed) if codes is None else codes
    generator = torch.Generator().manual_seed(seed)
    block = block or k
    num_blocks = -(-k // block)
    # Stored scales are positive, some 0; other signs are no reason to fail.
    scale = torch.randn(n, num_blocks, generator=generator) / 100
    scale[::7] = 0
    bias = torch.randn(n, generator=generator) if has_bias else None
    packed = native.Weight("f8_wide" if is_wide else "f8", n, k, block if num_blocks > 1 else 0)
    for first in range(0, n, 48):
        rows = codes[first : first + 48].contiguous()
        packed.pack(rows.data_ptr(), k, first, len(rows), num_threads=threads)
    whole = scale * native.float8_divisor()
    extras = {"block_scales": to_panels(whole)} if num_blocks > 1 else {"column_scale": pad_rows(whole[:, 0])}
    extras |= {} if bias is None else {"bias": pad_rows(bias)}
    packed.set_extras(**{name: tensor.data_ptr() for name, tensor in extras.items()})
    numbers = codes.view(torch.float8_e4m3fn).double()
    weights = numbers * scale.double().repeat_interleave(block, 1)[:, :k]
    return Float8Layer(packed, weights, bias, num_blocks, is_wide)


def run(layer, x, isa, finish=STORE, second=None, before=None, threads=1, activation=0, factor=1.0) -> Tensor:
    """Return out [m, n]; `before` is what it held. Fails if anything else was written."""
    m, n = len(x), len(layer.weights)
    memory = torch.full((m + 1, n + 19), float("nan"))
    out = memory[:m, 3 : n + 3]
    if before is not None:
        out.copy_(before)
    addresses = (x.data_ptr(), x.stride(0), m, out.data_ptr(), memory.stride(0))
    options = {"finish": finish, "activation": activation, "factor": factor, "num_threads": threads, "isa": isa}
    native.linear(layer.native, None if second is None else second.native, *addresses, **options)
    result = out.clone()
    out.fill_(float("nan"))
    assert memory.isnan().all()
    return result


def assert_within(got: Tensor, want: Tensor, error: Tensor) -> None:
    difference = (got.double() - want).abs()
    assert (difference <= error).all(), f"{(difference / error).nan_to_num().max().item():.3g} times the allowed error"


@pytest.fixture(params=[False, True], ids=["bf16-inputs", "f32-inputs"])
def is_wide(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_every_code_comes_out_as_its_number_with_its_sign(isa, is_wide):
    codes = torch.arange(256, dtype=torch.uint8).repeat(18, 1)
    packed = native.Weight("f8_wide" if is_wide else "f8", 18, 256)
    packed.pack(codes.data_ptr(), 256, 0, 18)
    scales = torch.full((32,), native.float8_divisor())
    packed.set_extras(column_scale=scales.data_ptr())
    want = codes[0].view(torch.float8_e4m3fn).float()
    is_number = ~want.isnan()
    for row in (0, 5, 17):
        got = torch.full((256,), float("nan"))
        packed.unpack_row(row, got.data_ptr(), isa)
        assert got[is_number].view(torch.int32).equal(want[is_number].view(torch.int32))


def test_every_code_is_multiplied_as_its_number(isa, is_wide):
    # One input at a time is 1: the result is the weight itself, subnormal or not, in single tiles and in expanded panels.
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).clone()
    codes[0, list(NOT_NUMBERS)] = 0
    layer = make_layer(17, 256, is_wide=is_wide, codes=codes.repeat(17, 1))
    got = run(layer, torch.eye(256), isa)
    assert torch.equal(got.double(), (layer.weights.T.float() * 1.0).double())
    assert torch.equal(run(layer, torch.eye(256)[:3].contiguous(), isa), got[:3])


@pytest.mark.parametrize("n, k, block", SHAPES)
def test_result_is_within_the_roundings_of_f64(isa, is_wide, n, k, block):
    layer = make_layer(n, k, block, is_wide=is_wide, has_bias=block == 128)
    for m in (1, 2, 3, 7, 16, 29, 64):
        x = make_inputs(m, k, seed=m)
        assert_within(run(layer, x, isa), *layer.apply(x))


@pytest.mark.parametrize("block", [0, 128])
def test_result_is_as_near_to_f64_as_that_of_the_dense_weight_in_bf16(isa, block):
    layer = make_layer(64, 512, block, seed=3)
    x = torch.randn(20, 512, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    rounded = layer.weights.to(torch.bfloat16)
    dense = native.Weight("bf16", 64, 512)
    dense.pack(rounded.data_ptr(), 512, 0, 64)
    plain = run(Float8Layer(dense, layer.weights, None, 1, False), x, isa)
    want = x.double() @ layer.weights.T
    errors = [(got.double() - want).abs() for got in (run(layer, x, isa), plain)]
    # The dense weight was rounded at 2^-9; here only sums are.
    assert errors[0].max() < errors[1].max() / 100


@settings(max_examples=80, derandomize=True, deadline=None)
@given(
    n=st.integers(1, 150),
    quarter=st.integers(1, 75),
    m=st.integers(1, 70),
    isa=st.sampled_from(ISAS),
    block=st.sampled_from([0, 4, 20, 32, 128]),
    is_wide=st.booleans(),
    has_bias=st.booleans(),
    threads=st.integers(1, 2),
)
def test_result_is_within_the_roundings_of_f64_at_any_shape(n, quarter, m, isa, block, is_wide, has_bias, threads):
    k = 4 * quarter
    layer = make_layer(n, k, block, is_wide=is_wide, has_bias=has_bias, seed=n * k, threads=threads)
    x = make_inputs(m, k, seed=m)
    assert_within(run(layer, x, isa, threads=threads), *layer.apply(x))


@pytest.mark.parametrize("block", [0, 128])
def test_row_is_the_same_to_the_bit_when_rows_and_threads_differ(isa, is_wide, block):
    layer = make_layer(150, 264, block, is_wide=is_wide)
    x = make_inputs(131, 264)
    alone = torch.cat([run(layer, row[None], isa) for row in x])
    for m in (*ROWS, 131):
        for threads in (1, 2, 3) if m in (2, 16, 131) else (1,):
            assert torch.equal(run(layer, x[:m], isa, threads=threads), alone[:m]), (m, threads)


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("finish", [ADD, GATE, ACTIVATE, MULTIPLY])
@pytest.mark.parametrize("block", [0, 128])
def test_finished_row_is_the_same_to_the_bit_and_that_of_torch(isa, is_wide, block, finish):
    layer, second = make_layer(71, 136, block, is_wide=is_wide), make_layer(71, 136, block, is_wide=is_wide, seed=1)
    generator = torch.Generator().manual_seed(3)
    x, before = torch.randn(61, 136, generator=generator) / 100, torch.randn(61, 71, generator=generator)
    options = {"finish": finish, "second": second if finish == GATE else None, "factor": 0.3}
    alone = torch.cat([run(layer, x[i : i + 1], isa, before=before[i : i + 1], **options) for i in range(61)])
    for m, threads in ((3, 1), (7, 2), (14, 1), (15, 3), (28, 1), (29, 2), (61, 1), (61, 3)):
        assert torch.equal(run(layer, x[:m], isa, before=before[:m], threads=threads, **options), alone[:m]), (m, threads)
    y, y2 = layer.apply(x)[0], second.apply(x)[0]
    want = {ADD: before + 0.3 * y, GATE: F.silu(y) * y2, ACTIVATE: F.silu(y), MULTIPLY: before * y}[finish]
    assert (alone - want).abs().max() < 1e-5 * (1 + want.abs().max())


def test_best_column_is_that_of_the_stored_results_when_padding_lies_behind_it(isa):
    layer = make_layer(33, 64, has_bias=True)
    x = torch.rand(9, 64)
    index = torch.full((9,), -7, dtype=torch.int32)
    native.linear(layer.native, None, x.data_ptr(), 64, 9, 0, 0, finish=BEST, best_index=index.data_ptr(), isa=isa)
    assert index.tolist() == run(layer, x, isa).argmax(1).tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_show_in_every_result_of_their_row_alone(isa, is_wide, bad):
    layer = make_layer(16, 132, 0, is_wide=is_wide, codes=random_codes(16, 132) | 8)
    x = torch.randn(9, 132, generator=torch.Generator().manual_seed(2))
    clean = run(layer, x, isa)
    x[4, 77] = bad
    got = run(layer, x, isa)
    assert torch.equal(got[[0, 1, 2, 3, 5, 6, 7, 8]], clean[[0, 1, 2, 3, 5, 6, 7, 8]])
    assert not got[4].isfinite().any()


@pytest.mark.parametrize("threads", [1, 3])
def test_weight_packed_in_parts_is_the_weight_packed_whole(threads):
    n, k, stride = 205, 36, 41
    source = random_codes(n, stride)
    packed = native.Weight("f8", n, k)
    for first, count in ((96, 109), (0, 16), (16, 80)):
        packed.pack(source[first].data_ptr(), stride, first, count, num_threads=threads)
    scales = torch.full((208,), native.float8_divisor())
    packed.set_extras(column_scale=scales.data_ptr())
    row = torch.full((k,), float("nan"))
    for index in range(n):
        packed.unpack_row(index, row.data_ptr(), ISAS[-1])
        assert torch.equal(row, source[index, :k].contiguous().view(torch.float8_e4m3fn).float())


def test_weights_take_a_byte_each_and_four_for_each_scale():
    assert make_layer(1024, 1024, 128).native.num_bytes == 1024 * 1024 + 4 * 1024 * 8
    assert make_layer(1024, 1024).native.num_bytes == 1024 * 1024 + 4 * 1024


def test_columns_and_blocks_that_are_no_whole_steps_are_refused():
    with pytest.raises(ValueError, match="multiple of 4 columns, got 10"):
        native.Weight("f8", 16, 10)
    with pytest.raises(ValueError, match="blocks of float8 must be a multiple of 4 columns, got 6"):
        native.Weight("f8", 16, 12, 6)
    scales = torch.ones(16 * 4)
    with pytest.raises(ValueError, match="scales of blocks"):
        native.Weight("f8", 16, 16, 4).set_extras(column_scale=scales.data_ptr())
    with pytest.raises(ValueError, match="scales of blocks"):
        native.Weight("f8", 16, 16).set_extras(block_scales=scales.data_ptr())
