"""simd.h on every instruction set of this machine: arithmetic, comparisons and products, against numpy and plain integers."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import torch

from tests.native_lanes import EDGES, ISAS, assert_same_bits, lanes, native, pairs, random_floats, run, ulps

# The polynomials are good to 1 ulp; the reduction of the argument and the last product round once each.
MAX_ULPS = 2.0


def test_exp_is_within_a_few_ulp_when_swept(isa: str):
    x = np.concatenate([np.linspace(-87.33, 88.72, 1 << 18), np.linspace(-0.5, 0.5, 1 << 16)]).astype(np.float32)
    assert ulps(lanes("exp", isa, x), np.exp(x.astype(np.float64))).max() <= MAX_ULPS


def test_exp_keeps_to_its_limits_when_out_of_range(isa: str):
    x = np.array([-np.inf, -1e30, -104.0, -87.4, 0.0, -0.0, 88.8, 1e30, np.inf, np.nan], dtype=np.float32)
    np.testing.assert_array_equal(
        lanes("exp", isa, x), np.array([0, 0, 0, 0, 1, 1, np.inf, np.inf, np.inf, np.nan], np.float32)
    )


def test_times_power_is_exact_when_the_result_is_normal_or_too_large(isa: str):
    x, n = (
        part.astype(np.float32)
        for part in np.broadcast_arrays(np.float32([1, 1.4142135, -0.75]), np.arange(-125, 129)[:, None])
    )
    with np.errstate(over="ignore"):
        expected = (x.astype(np.float64) * 2.0 ** n.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(lanes("times_power", isa, x.ravel(), n.ravel()), expected.ravel())


def test_tanh_is_within_a_few_ulp_when_swept(isa: str):
    x = np.concatenate([np.linspace(-10, 10, 1 << 18), np.linspace(-0.7, 0.7, 1 << 16), np.geomspace(1e-30, 1, 4096)]).astype(
        np.float32
    )
    assert ulps(lanes("tanh", isa, x), np.tanh(x.astype(np.float64))).max() <= MAX_ULPS


def test_tanh_keeps_to_its_limits_when_out_of_range(isa: str):
    x = np.array([-np.inf, -1e30, -20, -0.0, 0.0, 20, 1e30, np.inf, np.nan], dtype=np.float32)
    np.testing.assert_array_equal(lanes("tanh", isa, x), np.array([-1, -1, -1, 0, 0, 1, 1, 1, np.nan], np.float32))


@pytest.mark.parametrize("name", ["relu2", "xielu"])
def test_activations_match_f64_when_swept(isa: str, name: str):
    x = np.concatenate([np.linspace(-30, 30, 60001), np.geomspace(1e-7, 1, 999), -np.geomspace(1e-7, 1, 999)]).astype(
        np.float32
    )
    wide = x.astype(np.float64)
    bent = np.expm1(np.minimum(wide, -1e-6)) - wide
    xielu = np.where(wide > 0, np.float32(0.8) * wide**2, np.float32(1.3) * bent) + wide / 2
    want = {"relu2": np.maximum(wide, 0) ** 2, "xielu": xielu}[name]
    # e^x - 1 has the absolute error of e^x, which is what its difference from a small x has, too.
    np.testing.assert_allclose(lanes(name, isa, x), want, rtol=1e-6, atol=4e-7)
    assert np.isnan(lanes(name, isa, np.full(16, np.nan, np.float32))).all()


@pytest.mark.parametrize("name", ["abs", "sqrt", "round"])
def test_unary_gives_the_bits_of_numpy_when_given_any_float(isa: str, name: str):
    x = np.concatenate([EDGES, random_floats(8192, 3), np.linspace(-4, 4, 1025, dtype=np.float32)])
    with np.errstate(invalid="ignore"):
        want = {"abs": np.abs, "sqrt": np.sqrt, "round": np.rint}[name](x)
    assert_same_bits(lanes(name, isa, x), want)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_arithmetic_gives_the_bits_of_numpy_when_given_any_floats(isa: str, name: str):
    x, y = pairs(5)
    with np.errstate(all="ignore"):
        want = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[name](x, y)
    assert_same_bits(lanes(name, isa, x, y), want)


def test_max_and_min_take_the_second_when_either_is_nan(isa: str):
    x, y = pairs(7)
    assert_same_bits(lanes("max", isa, x, y), np.where(x > y, x, y))
    assert_same_bits(lanes("min", isa, x, y), np.where(x < y, x, y))


def test_zero_below_clears_lanes_under_the_limit_and_keeps_nan_when_compared(isa: str):
    limit, x = pairs(41)
    y = random_floats(x.size, 43)
    assert_same_bits(lanes("zero_below", isa, limit, x, y), np.where(x < limit, np.float32(0), y))


def test_fma_rounds_once_when_the_machine_can(isa: str):
    rng = np.random.default_rng(9)
    a, b, c = (rng.standard_normal(4096).astype(np.float32) for _ in range(3))
    exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    is_fused = isa != "portable" or platform.machine() in ("aarch64", "arm64")
    want = exact.astype(np.float32) if is_fused else (a * b) + c
    np.testing.assert_array_equal(lanes("fma", isa, a, b, c), want)


def test_to_i32_rounds_ties_to_even_when_between_integers(isa: str):
    ends = np.array([2147483520.0, -2147483648.0, 2147483648.0, np.nan], np.float32)
    x = np.concatenate([np.arange(-2000, 2000, dtype=np.float32) / 8, random_floats(4096, 11), ends])
    is_in = (x >= -(2.0**31)) & (x < 2.0**31)
    want = np.where(is_in, np.rint(np.where(is_in, x, 0)).astype(np.int64), -(2**31)).astype(np.int32)
    np.testing.assert_array_equal(lanes("to_i32", isa, x, dtype=np.int32), want)


def test_to_f32_rounds_to_nearest_when_an_integer_has_too_many_bits(isa: str):
    x = np.random.default_rng(13).integers(-(2**31), 2**31, 4096).astype(np.int32)
    np.testing.assert_array_equal(lanes("to_f32", isa, x), x.astype(np.float32))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "and", "or", "xor", "max", "min"])
def test_integers_wrap_when_they_overflow(isa: str, name: str):
    edges = np.array([0, 1, -1, 2**31 - 1, -(2**31), 46341, -46341, 255], dtype=np.int32)
    x, y = (v.ravel() for v in np.meshgrid(edges, edges))
    rng = np.random.default_rng(15)
    x, y = (np.concatenate([v, rng.integers(-(2**31), 2**31, 1024).astype(np.int32)]) for v in (x, y))
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or}
    operations |= {"xor": np.bitwise_xor, "max": np.maximum, "min": np.minimum}
    with np.errstate(over="ignore"):
        want = operations[name](x, y)
    np.testing.assert_array_equal(lanes(f"{name}_i32", isa, x, y, dtype=np.int32), want)


def test_shifts_and_iota_match_numpy_when_negative(isa: str):
    x = np.random.default_rng(17).integers(-(2**31), 2**31, 1024).astype(np.int32)
    unsigned = x.view(np.uint32)
    np.testing.assert_array_equal(lanes("shift_left_5", isa, x, dtype=np.int32), (unsigned << 5).view(np.int32))
    np.testing.assert_array_equal(lanes("shift_right_5", isa, x, dtype=np.int32), (unsigned >> 5).view(np.int32))
    np.testing.assert_array_equal(lanes("shift_right_signed_5", isa, x, dtype=np.int32), x >> 5)
    np.testing.assert_array_equal(lanes("add_iota", isa, 0 * x, dtype=np.int32), np.tile(np.arange(16), 64))


def mask_bits(values: np.ndarray) -> np.ndarray:
    return (values.reshape(-1, 16).astype(np.uint32) << np.arange(16, dtype=np.uint32)).sum(-1, dtype=np.uint32)


@pytest.mark.parametrize("name", ["less", "less_equal", "greater", "greater_equal", "either_is_nan", "both_are_nan"])
def test_comparisons_are_false_when_a_side_is_nan(isa: str, name: str):
    x, y = pairs(19)
    assert x.size % 16 == 0
    want = {
        "less": x < y,
        "less_equal": x <= y,
        "greater": x > y,
        "greater_equal": x >= y,
        "either_is_nan": np.isnan(x) | np.isnan(y),
        "both_are_nan": np.isnan(x) & np.isnan(y),
    }[name]
    got = run(name, isa, x, y, out=np.zeros(x.size // 16, np.uint32), count=x.size // 16)
    np.testing.assert_array_equal(got, mask_bits(want))


@pytest.mark.parametrize("name", ["equal_i32", "less_i32"])
def test_integer_comparisons_are_signed_when_negative(isa: str, name: str):
    rng = np.random.default_rng(21)
    x, y = rng.integers(-3, 4, 1024).astype(np.int32), rng.integers(-3, 4, 1024).astype(np.int32)
    got = run(name, isa, x, y, out=np.zeros(64, np.uint32), count=64)
    np.testing.assert_array_equal(got, mask_bits(x == y if name == "equal_i32" else x < y))


def folded(x: np.ndarray) -> np.ndarray:
    """Sum rows of sixteen by halves, in f32: the order that sum_lanes promises."""
    for width in (8, 4, 2, 1):
        x = x[:, :width] + x[:, width : 2 * width]
    return x[:, 0]


def test_sum_lanes_folds_halves_when_rounding_depends_on_the_order(isa: str):
    x = (np.random.default_rng(29).standard_normal((4096, 16)) * np.geomspace(1e-6, 1e6, 16)).astype(np.float32)
    got = run("sum_lanes", isa, x, out=np.full(4096, np.nan, np.float32), count=4096)
    np.testing.assert_array_equal(got.view(np.uint32), folded(x).view(np.uint32))


def test_sum_lanes_is_nan_when_any_lane_is(isa: str):
    x = np.ones((16, 16), np.float32)
    np.fill_diagonal(x, np.nan)
    assert np.isnan(run("sum_lanes", isa, x, out=np.zeros(16, np.float32), count=16)).all()


def test_max_lanes_finds_the_largest_when_it_is_in_any_lane(isa: str):
    x = np.random.default_rng(31).standard_normal((1024, 16)).astype(np.float32) - 10
    got = run("max_lanes", isa, x, out=np.full(1024, np.nan, np.float32), count=1024)
    np.testing.assert_array_equal(got, x.max(-1))


def dot_bf16_in_order(acc: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return acc + a[2i + 1] b[2i + 1], then + a[2i] b[2i], each sum rounded once.

    A product of two bf16 is exact in f64, and so is its sum with an f32 unless the exponents lie far apart.
    """
    a, b = a.reshape(-1, 2).astype(np.float64), b.reshape(-1, 2).astype(np.float64)
    first = (acc + a[:, 1] * b[:, 1]).astype(np.float32)
    return (first + a[:, 0] * b[:, 0]).astype(np.float32)


def test_dot_bf16_adds_the_odd_product_first_when_rounding_shows_it(isa: str):
    rng = np.random.default_rng(33)
    acc = rng.standard_normal(16 * 512).astype(np.float32)
    a, b = (torch.from_numpy(rng.standard_normal(32 * 512).astype(np.float32)).bfloat16() for _ in range(2))
    words = [x.view(torch.int16).numpy() for x in (a, b)]
    got = run("dot_bf16", isa, acc, *words, out=np.full(acc.size, np.nan, np.float32), count=512)
    np.testing.assert_array_equal(got, dot_bf16_in_order(acc, a.float().numpy(), b.float().numpy()))


@pytest.mark.parametrize("value", [np.inf, np.nan], ids=str)
def test_dot_bf16_is_not_finite_when_an_input_is_not(isa: str, value: float):
    acc, a = np.zeros(16, np.float32), torch.ones(32, dtype=torch.bfloat16)
    a[5] = value
    words = [x.view(torch.int16).numpy() for x in (a, torch.ones(32, dtype=torch.bfloat16))]
    got = run("dot_bf16", isa, acc, *words, out=np.zeros(16, np.float32), count=1)
    np.testing.assert_array_equal(got, np.where(np.arange(16) == 2, np.float32(value), np.float32(2)))


def test_dot_u8s8_is_exact_when_given_extremes(isa: str):
    # Every pair of the extremes in all four places, where sums of 16 bits would saturate, then random bytes.
    w_edges, x_edges = np.array([0, 1, 127, 128, 129, 254, 255]), np.array([-127, -126, -1, 0, 1, 126, 127])
    w, x = (v.ravel() for v in np.meshgrid(w_edges, x_edges))
    w, x = np.repeat(w, 64).reshape(-1, 64), np.repeat(x, 4).reshape(-1, 4)
    rng = np.random.default_rng(35)
    w = np.concatenate([w, rng.integers(0, 256, (2000, 64)), rng.choice([0, 255], (500, 64))])
    x = np.concatenate([x, rng.integers(-127, 128, (2000, 4)), rng.choice([-127, 127], (500, 4))])
    acc = rng.integers(-(2**30), 2**30, (len(w), 16)).astype(np.int32)
    want = acc + np.einsum("rij,rj->ri", w.reshape(-1, 16, 4), x)
    got = run("dot_u8s8", isa, acc, w.astype(np.uint8), x.astype(np.int8), out=np.zeros_like(acc), count=len(w))
    np.testing.assert_array_equal(got, want)


def test_unpack_nibbles_looks_up_low_and_high_when_given_every_byte(isa: str):
    packed = np.arange(256).astype(np.uint8)
    table = np.random.default_rng(37).permutation(256)[:16].astype(np.uint8)
    got = run("unpack_nibbles", isa, packed, np.tile(table, 4), out=np.zeros((4, 2, 64), np.uint8), count=4)
    np.testing.assert_array_equal(got[:, 0].ravel(), table[packed & 15])
    np.testing.assert_array_equal(got[:, 1].ravel(), table[packed >> 4])


def test_set1_bytes_repeats_four_bytes_when_they_differ(isa: str):
    got = run("set1_bytes", isa, np.array([0x04030201], np.uint32), out=np.zeros(64, np.uint8), count=1)
    np.testing.assert_array_equal(got, np.tile([1, 2, 3, 4], 16))


def test_an_unknown_operation_is_refused_when_asked_for():
    with pytest.raises(ValueError, match="no_such"):
        native.simd("no_such", 0, 0, 0, 0, 1)
    with pytest.raises(ValueError, match="sse9"):
        native.simd("exp", 0, 0, 0, 0, 0, "sse9")


@pytest.mark.skipif(not {"avx2", "avx512"} <= set(ISAS), reason="needs AVX2 and AVX-512")
@pytest.mark.parametrize("name", ["exp", "tanh", "silu", "gelu", "gelu_tanh", "relu2", "xielu"])
def test_functions_give_the_same_bits_when_both_machines_have_fma(name: str):
    x = np.concatenate([np.linspace(-100, 100, 1 << 16).astype(np.float32), EDGES, random_floats(4096, 39)])
    np.testing.assert_array_equal(lanes(name, "avx2", x).view(np.uint32), lanes(name, "avx512", x).view(np.uint32))


@pytest.mark.parametrize("distance", [1, 2, 4, 8])
def test_swap_lanes_exchanges_lanes_at_a_distance(isa: str, distance: int):
    x = np.arange(32, dtype=np.float32)
    np.testing.assert_array_equal(lanes(f"swap_lanes_{distance}", isa, x), x[np.arange(32) ^ distance])


def test_load_u8_widens_the_chosen_bytes(isa: str):
    x = np.arange(240, 256).astype(np.uint8)
    mask = (np.arange(16) < 11).astype(np.int32)
    got = run("load_u8", isa, x, mask, out=np.zeros(16, np.int32), count=1)
    np.testing.assert_array_equal(got, x * mask)


def test_level_pairs_looks_up_both_indices_when_given_every_pair(isa: str):
    levels = np.random.default_rng(5).permutation(65536)[:16].astype(np.uint16)
    low, high = (index.ravel() for index in np.meshgrid(np.arange(16), np.arange(16)))
    indices = (low | high << 16).astype(np.int32)
    got = run("level_pairs", isa, indices, np.tile(levels, 16), out=np.zeros(256, np.uint32), count=16)
    np.testing.assert_array_equal(got, levels[low].astype(np.uint32) | levels[high].astype(np.uint32) << 16)
