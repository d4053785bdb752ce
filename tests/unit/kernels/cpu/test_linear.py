"""Packed linear layers on every instruction set of this machine, against f64.

The results must lie within what their roundings may change; packed_layers.py says for each format what that is.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.kernels.cpu.packed_layers import (
    LINEAR_LEVELS,
    UNEVEN_LEVELS,
    UNIT,
    Layer,
    constant_layer,
    make_inputs,
    make_layer,
    quantize,
    run_apart,
)

native = pytest.importorskip("quire.kernels.cpu._native", reason="the native kernels are not built")
if not hasattr(native, "linear"):
    pytest.skip("built without the linear component", allow_module_level=True)

ISAS = native.supported_isas()
STORE, ADD, GATE, ACTIVATE, MULTIPLY, BEST = range(6)
ACTIVATIONS = (F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.relu)
QUANTIZED = ("scales", "offsets", "column_scale", "bias")
# (format, group, options): group 0 is one group for the whole row.
FORMATS = {
    "bf16": ("bf16", 0, ()),
    "bf16-bias": ("bf16", 0, ("bias",)),
    "f32": ("f32", 0, ()),
    "f32-bias": ("f32", 0, ("bias",)),
    "f16": ("f16", 0, ()),
    "f16-bias": ("f16", 0, ("bias",)),
    "u8-input-groups": ("u8", 128, ("column_scale",)),
    "u8-whole-row": ("u8", 0, ("column_scale", "bias")),
    "u8-offset": ("u8", 0, QUANTIZED),
    "u8-groups": ("u8", 32, QUANTIZED),
    "u8-columns": ("u8", 64, ("scales", "column_scale", "columns")),
    "u4-32": ("u4", 32, ("scales", "column_scale")),
    "u4-64-offset": ("u4", 64, QUANTIZED),
    "u4-128": ("u4", 128, ("scales", "column_scale", "bias")),
    "u4-128-uneven": ("u4", 128, ("scales", "column_scale")),
    "u4-row": ("u4", 0, ("column_scale",)),
    "u4-columns": ("u4", 32, (*QUANTIZED, "columns")),
}
LOWEST_LEVELS = (-128, *UNEVEN_LEVELS[1:])
# Around the steps of the formats (2, 4, 8), a panel (16), a unit of work (64, 128 outputs) and groups.
SHAPES = [(1, 1), (15, 7), (16, 8), (17, 31), (33, 129), (65, 258), (130, 132), (200, 300)]


@pytest.fixture(params=FORMATS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def layer_of(kind: str, n: int, k: int, **options) -> Layer:
    format, group, parts = FORMATS[kind]
    levels = UNEVEN_LEVELS if kind.endswith("uneven") else None
    return make_layer(native, format, n, k, group, **{"options": parts, "levels": levels, **options})


def run(
    layer: Layer,
    x: Tensor,
    isa: str,
    finish=STORE,
    second=None,
    before=None,
    threads=1,
    activation=0,
    factor=1.0,
    clamp=(0.0, 1.0),
) -> Tensor:
    """Return out [m, n]; `before` is what it held. Fails if anything else was written."""
    m, n = len(x), layer.codes.shape[0]
    memory = torch.full((m + 1, n + 19), float("nan"))
    out = memory[:m, 3 : n + 3]
    if before is not None:
        out.copy_(before)
    other = None if second is None else second.native
    native.linear(
        layer.native,
        other,
        x.data_ptr(),
        x.stride(0),
        m,
        out.data_ptr(),
        memory.stride(0),
        finish=finish,
        activation=activation,
        factor=factor,
        num_threads=threads,
        isa=isa,
        limit=clamp[0],
        slope=clamp[1],
    )
    result = out.clone()
    out.fill_(float("nan"))
    assert memory.isnan().all()
    return result


def run_best(layer: Layer, x: Tensor, isa: str, threads: int = 1) -> list[int]:
    index = torch.full((len(x),), -7, dtype=torch.int32)
    native.linear(
        layer.native,
        None,
        x.data_ptr(),
        x.stride(0),
        len(x),
        0,
        0,
        finish=BEST,
        best_index=index.data_ptr(),
        num_threads=threads,
        isa=isa,
    )
    return index.tolist()


def assert_within(got: Tensor, want: Tensor, error: Tensor) -> None:
    difference = (got.double() - want).abs()
    assert (difference <= error).all(), f"{(difference / error).nan_to_num().max().item():.3g} times the allowed error"


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("n, k", SHAPES)
def test_result_is_within_the_roundings_of_f64(isa, kind, n, k):
    layer = layer_of(kind, n, k)
    for m in (1, 2, 3, 7, 16, 29, 64):
        x = make_inputs(m, k, seed=m)
        assert_within(run(layer, x, isa), *layer.apply(x))


def test_result_is_within_the_roundings_of_f64_when_rows_are_hundreds(isa, kind):
    layer = layer_of(kind, 70, 260)
    x = make_inputs(333, 260)
    assert_within(run(layer, x, isa, threads=2), *layer.apply(x))


def test_result_is_within_the_roundings_of_f64_when_inputs_are_widened_in_parts(isa):
    """With sixteen registers of 256 bits inputs of bf16 become floats, 8 MiB at once: here 252 rows."""
    layer = make_layer(native, "bf16", 20, 8192)
    x = make_inputs(300, 8192)
    got = run(layer, x, isa, threads=2)
    assert_within(got, *layer.apply(x))
    assert torch.equal(got[290:], torch.cat([run(layer, row[None], isa) for row in x[290:]]))


@pytest.mark.parametrize("level", [0, 15])
@pytest.mark.parametrize("levels", [*(tuple(range(n, n + 16)) for n in (-128, -8, 0, 112)), UNEVEN_LEVELS, LOWEST_LEVELS])
def test_sums_of_four_bit_codes_fit_when_all_codes_and_inputs_are_largest(isa, levels, level):
    k = 256
    layer = make_layer(native, "u4", 16, k, 128, options=("scales",), levels=levels)
    codes = torch.full((16, k), levels[level], dtype=torch.int8)
    numbers = torch.tensor(levels, dtype=torch.int8)
    layer.native.pack(codes.data_ptr(), k, 0, 16, levels=numbers.data_ptr(), num_levels=16)
    ones = torch.ones(1, k // 128, 16).half()
    layer.native.set_extras(group_scales=ones.data_ptr())
    x = torch.tensor([127.0, -127.0])[:, None].repeat(1, k)
    want = torch.tensor([127.0, -127.0])[:, None].repeat(1, 16) * k * levels[level]
    assert torch.equal(run(layer, x, isa), want)
    assert torch.equal(run(layer, x[1:], isa), want[1:])  # a tile of one row


@pytest.mark.parametrize("levels", [LINEAR_LEVELS, tuple(range(16)), UNEVEN_LEVELS, (-3, 0, 100), (5,), (-128, 127)])
@pytest.mark.parametrize("group, options", [(32, ("scales",)), (64, QUANTIZED), (128, QUANTIZED), (0, QUANTIZED)])
def test_four_bit_levels_are_looked_up(isa, levels, group, options):
    layer = make_layer(native, "u4", 37, 203, group, options=options, levels=levels)
    x = make_inputs(17, 203)
    assert_within(run(layer, x, isa), *layer.apply(x))


@pytest.mark.parametrize("format", ["bf16", "f16", "f32"])
def test_inputs_are_permuted_when_a_dense_weight_has_columns(isa, format):
    layer = make_layer(native, format, 20, 53, options=("columns",))
    x = make_inputs(9, 53)
    assert_within(run(layer, x, isa), *layer.apply(x))


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    n=st.integers(1, 150),
    k=st.integers(1, 300),
    m=st.integers(1, 70),
    isa=st.sampled_from(ISAS),
    format=st.sampled_from(["bf16", "f16", "f32", "u8", "u4"]),
    group=st.sampled_from([0, 8, 16, 24, 32, 64, 128, 256]),
    options=st.sets(st.sampled_from([*QUANTIZED, "columns"])),
    threads=st.integers(1, 2),
)
def test_result_is_within_the_roundings_of_f64_at_any_shape(n, k, m, isa, format, group, options, threads):
    if format in ("bf16", "f16", "f32"):
        options = options & {"bias", "column_scale"}
    layer = make_layer(native, format, n, k, group, options=tuple(options), seed=n * k)
    x = make_inputs(m, k, seed=m)
    assert_within(run(layer, x, isa, threads=threads), *layer.apply(x))


@pytest.mark.parametrize("kind", [kind for kind, (format, *_) in FORMATS.items() if format.startswith("u")])
def test_quantising_inputs_changes_each_by_at_most_half_a_step(isa, kind):
    # Not what the kernel rounds to, but what it may cost: |w| times half a step of the input's group.
    layer = layer_of(kind, 33, 300)
    x = make_inputs(21, 300)
    x = x[(x.abs().amax(1) > 1e-20) & (x.abs().amax(1) < 1e20)]
    weights = layer.weights()
    ordered = x if layer.columns is None else x[:, layer.columns]
    steps = torch.cat([quantize(part)[1].expand(-1, part.shape[1]) for part in ordered.split(layer.group, 1)], 1)
    natural = steps if layer.columns is None else torch.empty_like(steps).index_copy_(1, layer.columns, steps)
    want = x.double() @ weights.T + (0 if layer.bias is None else layer.bias)
    sizes = x.abs().double() @ weights.abs().T + (0 if layer.bias is None else layer.bias.abs())
    assert_within(run(layer, x, isa), want, 0.501 * natural @ weights.abs().T + 100 * UNIT * sizes)


@pytest.mark.covering
def test_row_is_the_same_to_the_bit_when_rows_and_threads_differ(isa, kind):
    layer = layer_of(kind, 150, 264)
    x = make_inputs(131, 264)
    alone = torch.cat([run(layer, row[None], isa) for row in x])
    for m in (2, 3, 4, 5, 6, 7, 8, 13, 14, 15, 16, 28, 29, 57, 60, 131):
        for threads in (1, 2, 3) if m in (2, 16, 131) else (1,):
            assert torch.equal(run(layer, x[:m], isa, threads=threads), alone[:m]), (m, threads)


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("finish", [ADD, GATE, ACTIVATE, MULTIPLY])
def test_finished_row_is_the_same_to_the_bit_when_rows_and_threads_differ(isa, kind, finish):
    layer, second = layer_of(kind, 71, 136), layer_of(kind, 71, 136, seed=1)
    if layer.columns is not None:
        pytest.skip("both weights of a gate take the inputs in one order")
    x, before = make_inputs(61, 136), torch.randn(61, 71, generator=torch.Generator().manual_seed(3))
    options = {"finish": finish, "second": second if finish == GATE else None, "factor": 0.3}
    alone = torch.cat([run(layer, x[i : i + 1], isa, before=before[i : i + 1], **options) for i in range(61)])
    for m, threads in ((3, 1), (7, 2), (14, 1), (15, 3), (28, 1), (29, 2), (61, 1), (61, 3)):
        assert torch.equal(run(layer, x[:m], isa, before=before[:m], threads=threads, **options), alone[:m]), (m, threads)


def finishing_inputs(m: int, k: int) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)) / k**0.5


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("m", [1, 5, 40])
def test_add_and_multiply_join_what_is_there(isa, kind, m):
    layer, x = layer_of(kind, 35, 72), finishing_inputs(m, 72)
    y, error = layer.apply(x)
    before = torch.randn(m, 35, generator=torch.Generator().manual_seed(5))
    sizes = y.abs() + before.abs()
    added = run(layer, x, isa, ADD, before=before, factor=-0.75)
    assert_within(added, before.double() - 0.75 * y, error + 2 * UNIT * sizes)
    multiplied = run(layer, x, isa, MULTIPLY, before=before)
    assert_within(multiplied, before.double() * y, error * before.abs() + 2 * UNIT * (y * before).abs() + 1e-37)


def activation_error(y: Tensor, error: Tensor) -> Tensor:
    # No activation is steeper than 1.13; then what activation.h promises of itself, and x's own rounding in its exponent.
    return 1.2 * error + 4e-7 + 4e-6 * y.abs()


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("activation", range(4), ids=["silu", "gelu", "gelu_tanh", "relu"])
def test_activate_and_gate_are_those_of_torch(isa, kind, activation):
    layer, second = layer_of(kind, 35, 72), layer_of(kind, 35, 72, seed=1)
    for m in (1, 3, 7, 14, 29):
        x = finishing_inputs(m, 72)
        (y, error), (y2, error2) = layer.apply(x), second.apply(x)
        want, error = ACTIVATIONS[activation](y), activation_error(y, error)
        assert_within(run(layer, x, isa, ACTIVATE, activation=activation), want, error)
        if layer.columns is None:
            gated = run(layer, x, isa, GATE, second, activation=activation)
            bound = error * (y2.abs() + error2) + want.abs() * error2 + UNIT * (want * y2).abs()
            assert_within(gated, want * y2, bound)


CLAMPS = [(7.0, 1.702), (0.5, 0.9), (1.0, 3.0)]


def clamped_gate(y: Tensor, y2: Tensor, clamp: tuple[float, float]) -> Tensor:
    limit, slope = clamp
    gate, up = y.clamp(max=limit), y2.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(slope * gate)


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("clamp", CLAMPS)
def test_clamped_gate_is_that_of_torch(isa, kind, clamp):
    layer, second = layer_of(kind, 35, 72), layer_of(kind, 35, 72, seed=1)
    if layer.columns is not None:
        pytest.skip("both weights of a gate take the inputs in one order")
    for m in (1, 3, 14, 29):
        x = 3 * finishing_inputs(m, 72)
        (y, error), (y2, error2) = layer.apply(x), second.apply(x)
        want, glu = clamped_gate(y, y2, clamp), y.clamp(max=clamp[0])
        # As that of an activation, of which the slope is a factor of the input and of the steepness.
        bound = clamp[1] * activation_error(glu, error) * (1 + y2.abs().clamp(max=clamp[0]) + error2) + glu.abs() * error2
        assert_within(run(layer, x, isa, GATE, second, clamp=clamp), want, bound + 4e-6 * want.abs() + 1e-6)


@pytest.mark.parametrize("kind", ["bf16-bias", "f32-bias", "u4-128"])
def test_clamped_gate_is_the_same_to_the_bit_when_rows_and_threads_differ_and_keeps_nan(isa, kind):
    layer, second = layer_of(kind, 71, 136), layer_of(kind, 71, 136, seed=1)
    x = finishing_inputs(61, 136)
    options = {"finish": GATE, "second": second, "clamp": (0.7, 1.702)}
    alone = torch.cat([run(layer, x[i : i + 1], isa, **options) for i in range(61)])
    for m, threads in ((3, 1), (7, 2), (15, 3), (61, 3)):
        assert torch.equal(run(layer, x[:m], isa, threads=threads, **options), alone[:m]), (m, threads)
    if kind != "u4-128":
        x[7] = torch.nan
        found = run(layer, x, isa, **options)
        assert found[7].isnan().all()
        assert torch.equal(found[8:], alone[8:])


@pytest.mark.parametrize("inner, finish", [(1, GATE), (15, ACTIVATE), (33, GATE), (72, ACTIVATE), (130, GATE)])
@pytest.mark.parametrize("clamp", [(0.0, 1.0), (0.5, 1.702)], ids=["plain", "clamped"])
def test_packed_result_is_to_the_next_layer_what_the_stored_one_is(isa, inner, finish, clamp):
    bias = ("bias",)
    layer, second, following = (
        make_layer(native, "bf16", n, k, 0, options=options, seed=seed)
        for seed, (n, k, options) in enumerate([(inner, 72, bias), (inner, 72, bias), (50, inner, ())])
    )
    for m, threads in ((1, 1), (2, 2), (7, 1), (16, 2), (17, 3), (28, 1), (29, 2), (61, 2)):
        x, out = finishing_inputs(m, 72), torch.full((m, 50), float("nan"))
        x[m // 2, 3] = torch.nan
        want = run(following, run(layer, x, isa, finish, second if finish == GATE else None, clamp=clamp), isa)
        other = second.native if finish == GATE else None
        addresses = (x.data_ptr(), 72, m, out.data_ptr(), 50)
        native.linear(
            layer.native,
            other,
            *addresses,
            finish=finish,
            following=following.native,
            num_threads=threads,
            isa=isa,
            limit=clamp[0],
            slope=clamp[1],
        )
        assert torch.equal(out.nan_to_num(7.0), want.nan_to_num(7.0)), (m, threads)
        assert out[m // 2].isnan().all()


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_best_is_the_first_largest_result(isa, kind, threads):
    layer = layer_of(kind, 333, 40)
    for m in (1, 2, 16, 50):
        x = finishing_inputs(m, 40)
        assert run_best(layer, x, isa, threads) == run(layer, x, isa).argmax(1).tolist()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_best_is_the_lowest_index_when_results_are_equal(isa, threads):
    generator = torch.Generator().manual_seed(0)
    for n in (1, 5, 16, 17, 300, 1000):
        for bias in (torch.zeros(n), torch.full((n,), -torch.inf), torch.randint(0, 3, (n,), generator=generator).float()):
            layer = constant_layer(native, bias)
            assert run_best(layer, torch.ones(20, 8), isa, threads) == [int(bias.argmax())] * 20


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 15, 16, 170, 299])
def test_best_is_the_nan_when_there_is_one(isa, threads, at):
    bias = torch.randn(300, generator=torch.Generator().manual_seed(1))
    bias[77] = torch.inf
    bias[at] = torch.nan
    assert run_best(constant_layer(native, bias), torch.ones(5, 8), isa, threads) == [at] * 5


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_best_is_a_nan_when_there_are_several(isa, threads):
    bias = torch.zeros(1000)
    bias[[90, 91, 500, 999]] = torch.nan
    found = run_best(constant_layer(native, bias), torch.ones(5, 8), isa, threads)
    assert set(found) <= {90, 91, 500, 999}


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("m", [5, 40])
def test_nan_and_inf_show_in_every_result_of_their_row_alone(isa, kind, bad, m):
    layer = layer_of(kind, 35, 150)
    x = torch.randn(m, 150, generator=torch.Generator().manual_seed(2))
    clean = run(layer, x, isa)
    for position in (0, 77, 149):
        broken = x.clone()
        broken[2, position] = bad
        got = run(layer, broken, isa)
        others = [row for row in range(m) if row != 2]
        assert torch.equal(got[others], clean[others])
        assert not got[2].isfinite().any()
        if bad != bad:
            assert got[2].isnan().all()
        elif not layer.is_quantized:
            weights = layer.weights()[:, position].float()
            want = torch.where(weights == 0, torch.nan, bad * weights.sign())
            assert torch.equal(got[2].nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("activation", range(4), ids=["silu", "gelu", "gelu_tanh", "relu"])
def test_activated_nan_stays_nan(isa, activation):
    layer = constant_layer(native, torch.full((20,), torch.nan))
    x = torch.ones(3, 8)
    assert run(layer, x, isa, ACTIVATE, activation=activation).isnan().all()
    assert run(layer, x, isa, GATE, constant_layer(native, torch.zeros(20)), activation=activation).isnan().all()
    assert run(layer, x, isa, MULTIPLY, before=torch.zeros(3, 20)).isnan().all()
    assert run(layer, x, isa, ADD, before=torch.zeros(3, 20), factor=0.0).isnan().all()


def unpack(layer: Layer, isa: str) -> Tensor:
    n, k = layer.codes.shape
    memory = torch.full((n, k + 16), float("nan"))
    for row in range(n):
        layer.native.unpack_row(row, memory[row].data_ptr(), isa)
    assert memory[:, k:].isnan().all()
    return memory[:, :k]


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("n, k", [(1, 1), (15, 9), (33, 129), (70, 300)])
def test_unpacked_rows_are_what_was_packed(isa, kind, n, k):
    layer = layer_of(kind, n, k)
    got, want = unpack(layer, isa), layer.weights()
    # Codes with their scale, offset and column scale: one rounding each.
    exact = torch.zeros(n, k, dtype=torch.float64) if not layer.is_quantized else 4 * UNIT * want.abs()
    if layer.offset is not None:
        exact += 4 * UNIT * 20 * layer.column_scale[:, None]
    assert ((got.double() - want).abs() <= exact).all()


@pytest.mark.parametrize("format", ["bf16", "f16", "f32"])
def test_unpacked_rows_are_the_bits_that_were_packed(isa, format):
    # Which bits a NaN of f16 has as f32 is not the same everywhere.
    odd = 65504.0 if format == "f16" else torch.nan
    values = torch.tensor([0.0, -0.0, 1e-41, -3e-39, 3e38, torch.inf, -torch.inf, odd, 1.0]).repeat(18, 1)
    values = values.to({"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[format])
    packed = native.Weight(format, 18, 9)
    packed.pack(values.data_ptr(), 9, 0, 18)
    layer = Layer(packed, format, values.double(), 0, None, None, None, None, None)
    assert torch.equal(unpack(layer, isa).view(torch.int32), values.float().view(torch.int32))


@pytest.mark.parametrize("format", ["bf16", "f16", "f32"])
def test_unpacked_rows_are_in_natural_order_when_a_dense_weight_has_columns(isa, format):
    layer = make_layer(native, format, 20, 53, options=("columns",))
    assert torch.equal(unpack(layer, isa).double(), layer.weights())


@pytest.mark.parametrize("format", ["bf16", "f16", "f32", "u8", "u4"])
@pytest.mark.parametrize("threads", [1, 3])
def test_weight_packed_in_parts_is_the_weight_packed_whole(format, threads):
    n, k, stride = 205, 37, 41
    generator = torch.Generator().manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}.get(format, torch.int8)
    source = torch.randint(-8, 8, (n, stride), generator=generator).to(dtype)
    levels = torch.tensor(LINEAR_LEVELS, dtype=torch.int8)
    options = {"levels": levels.data_ptr(), "num_levels": 16} if format == "u4" else {}
    packed = native.Weight(format, n, k, k)
    for first, count in ((96, 109), (0, 16), (16, 80)):
        packed.pack(source[first].data_ptr(), stride, first, count, num_threads=threads, **options)
    layer = Layer(packed, format, source[:, :k].double(), k, None, None, None, None, None)
    assert torch.equal(unpack(layer, ISAS[-1]).double(), layer.codes)


@pytest.mark.parametrize("format, group", [("u8", 128), ("u4", 64), ("bf16", 0)])
def test_places_are_right_when_a_weight_has_more_than_2_to_the_31_inputs_and_outputs(isa, format, group):
    # Memory that is not packed is never taken from the system: it is read as zeros.
    n, k = 40_000, 60_000
    packed = native.Weight(format, n, k, group)
    source = (torch.arange(16 * k).view(16, k) % 13 - 6).to(torch.bfloat16 if format == "bf16" else torch.int8)
    levels = torch.tensor(LINEAR_LEVELS, dtype=torch.int8)
    options = {"levels": levels.data_ptr(), "num_levels": 16} if format == "u4" else {}
    packed.pack(source.data_ptr(), k, n - 16, 16, **options)
    row = torch.full((k,), float("nan"))
    for index in (0, 15):
        packed.unpack_row(n - 16 + index, row.data_ptr(), isa)
        assert torch.equal(row, source[index].float())


def test_groups_of_four_inputs_stay_in_their_row_when_the_padding_of_the_row_is_as_long():
    # In a process of its own: a kernel that takes the padding of K for another group writes past the inputs' scales.
    code = """
import torch
from quire.kernels.cpu import _native as native
from tests.unit.kernels.cpu.packed_layers import make_layer
from tests.unit.kernels.cpu.test_linear import assert_within, run
for k, group in ((12, 4), (60, 20), (140, 28)):
    layer = make_layer(native, "u8", 40, k, group, options=("scales", "column_scale"))
    x = torch.randn(101, k, generator=torch.Generator().manual_seed(0))
    for isa in native.supported_isas():
        assert_within(run(layer, x, isa), *layer.apply(x))
"""
    run_apart(code)


def test_best_is_found_when_fewer_threads_come_than_were_asked_for():
    code = """
import torch
from quire.kernels.cpu import _native as native
from tests.unit.kernels.cpu.packed_layers import make_layer
from tests.unit.kernels.cpu.test_linear import run, run_best
layer = make_layer(native, "f32", 333, 40)
x = torch.randn(9, 40, generator=torch.Generator().manual_seed(0))
isa = native.isa()
assert run_best(layer, x, isa, threads=3) == run(layer, x, isa).argmax(1).tolist(), run_best(layer, x, isa, threads=3)
"""
    run_apart(code, OMP_THREAD_LIMIT="1")


def test_weight_is_refused_when_its_shape_or_group_cannot_be():
    for arguments in (("bf16", 0, 5), ("f32", 5, 0), ("u8", 4, 64, 6), ("u4", 4, 64, 12), ("u4", 4, 60001, 32), ("i8", 4, 4)):
        with pytest.raises(ValueError):
            native.Weight(*arguments)
