"""The native kernels of quantisation: bit for bit what torch computes, on every instruction set and for any input."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from quire.quant import quantize
from quire.quant.quantize import INT8, NONLINEAR_LEVELS, Scheme, native_quantizer, nearest_table, quantize_weight, sqnr_db

native = pytest.importorskip("quire.kernels.cpu._native", reason="the native kernels are not built")
if not hasattr(native, "quantize_search"):
    pytest.skip("built without the quantize component", allow_module_level=True)

ISAS = native.supported_isas()
SCHEMES = [Scheme(kind, size) for kind in ("linear", "nonlinear", "affine") for size in (32, 64, 128)] + [INT8]
DTYPES = [torch.bfloat16, torch.float32]


def name_of(scheme):
    return scheme.kind if scheme == INT8 else f"{scheme.kind}-{scheme.group_size}"


def normal(num_rows, num_columns, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(num_rows, 1, generator=generator).exp()
    return (torch.randn(num_rows, num_columns, generator=generator) * spread).to(dtype)


def any_floats(num_rows, num_columns, seed, dtype=torch.float32):
    """All bit patterns alike but for NaN and infinity: every exponent, denormals among them."""
    words = torch.randint(-(2**31), 2**31, (num_rows, num_columns), generator=torch.Generator().manual_seed(seed))
    weight = words.to(torch.int32).view(torch.float32).to(dtype)
    return torch.where(torch.isfinite(weight), weight, 0)


def reference(weight, scheme, scale_dtype=None):
    """Quantise with torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "load_native", lambda: None)
        return quantize_weight(weight, scheme, scale_dtype)


def assert_native_is_torch(weight, scheme, isa):
    """Compare unrounded scales and offsets by their bits, and the codes that the rounded ones give."""
    expected = reference(weight, scheme)
    quantizer = native_quantizer(native, scheme, isa)
    for found, wanted in zip(quantizer.search(weight), quantize.search_scales(scheme, weight), strict=True):
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
    codes = torch.full(weight.shape, 99, dtype=torch.int8)
    quantizer.encode(weight, expected.scale, expected.offset, codes)
    assert torch.equal(codes, expected.codes)


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_result_is_that_of_torch_when_weights_are_normal(scheme, dtype, isa):
    for num_rows, num_columns in ((1, 128), (7, 384), (33, 1152)):
        assert_native_is_torch(normal(num_rows, num_columns, num_rows, dtype), scheme, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_columns", [1, 15, 16, 17, 33, 100, 257])
def test_int8_is_that_of_torch_when_columns_are_odd(num_columns, isa):
    for dtype in DTYPES:
        assert_native_is_torch(normal(5, num_columns, dtype=dtype), INT8, isa)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    scheme=st.sampled_from(SCHEMES),
    num_rows=st.integers(1, 20),
    num_groups=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
    isa=st.sampled_from(ISAS),
    seed=st.integers(0, 1000),
)
def test_result_is_that_of_torch_when_weights_are_any_numbers(scheme, num_rows, num_groups, dtype, isa, seed):
    assert_native_is_torch(any_floats(num_rows, num_groups * scheme.group_size, seed, dtype), scheme, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_result_is_that_of_torch_when_weights_lie_at_ends_and_between_levels(scheme, isa):
    weight = torch.zeros(12, 128)
    weight[1] = -0.0
    weight[2] = 0.75
    weight[3] = 3.4028235e38 * (1 - torch.arange(128) % 3)
    weight[4] = 1e-45 * (torch.arange(128) % 5)
    weight[5] = 1.1754944e-38 * (torch.arange(128) - 60)
    weight[6] = torch.arange(128) / 2 - 63.5
    weight[7] = (torch.arange(128) - 127) / 2  # midpoints of levels, with a level at the extreme
    weight[8, 77] = -1e-30
    weight[9, :64], weight[9, 64:] = 1e-44, 1e38
    weight[10] = torch.arange(128) % 16
    weight[11] = -(torch.arange(128) % 2).float()
    assert_native_is_torch(weight, scheme, isa)


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_result_is_that_of_torch_when_a_weight_is_not_finite(scheme, bad, isa):
    weight = normal(5, 256)
    weight[1, 3] = weight[3, 255] = bad
    for dtype in DTYPES:
        assert_native_is_torch(weight.to(dtype), scheme, isa)


@pytest.mark.parametrize("load", ["native", "torch"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_row_is_nan_and_others_are_not_when_one_of_its_weights_is_not_finite(scheme, bad, load):
    weight = normal(4, 256)
    weight[1, 3] = bad
    quantized = (quantize_weight if load == "native" else reference)(weight, scheme)
    assert quantized.scale[1].isnan().all()
    assert quantized.dequantize()[1].isnan().all()
    rest = quantize_weight(weight[2:], scheme)
    assert torch.equal(quantized.codes[2:], rest.codes)
    assert torch.equal(quantized.scale[2:], rest.scale)
    if quantized.levels is not None:
        assert set(quantized.codes.flatten().tolist()) <= set(quantized.levels)


@pytest.mark.parametrize("factor", [2.0**-118, 2.0**-60, 2.0**60, 2.0**120])
@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_codes_are_the_same_when_weights_are_very_small_or_large(scheme, factor):
    # In bf16, so that what 2^-118 makes denormal still keeps its bits.
    weight = normal(6, 128).clamp(-30, 30).bfloat16().float()
    weight = torch.where(weight.abs() < 2**-6, 0, weight)
    plain, scaled = quantize_weight(weight, scheme, torch.float32), quantize_weight(weight * factor, scheme, torch.float32)
    if factor < 2.0**-100:
        # Their scales are denormal and have fewer bits: a weight near a midpoint may go to the other side.
        assert float((plain.codes == scaled.codes).float().mean()) > 0.95
        return
    assert torch.equal(plain.codes, scaled.codes)
    assert torch.equal(plain.scale * factor, scaled.scale)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scheme", [Scheme("nonlinear"), Scheme("affine", 64), INT8], ids=name_of)
def test_result_is_the_same_when_threads_differ(scheme, isa):
    weight = normal(300, 256, dtype=torch.bfloat16)
    results, before = [], torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            quantizer = native_quantizer(native, scheme, isa)
            found = quantizer.search(weight)
            codes = torch.full(weight.shape, 99, dtype=torch.int8)
            quantizer.encode(weight, found[0], found[1] if len(found) > 1 else None, codes)
            results.append((*found, codes))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("scheme", [Scheme("nonlinear"), Scheme("affine", 64), INT8], ids=name_of)
def test_result_is_that_of_torch_when_rows_are_apart_or_columns_or_of_another_type(scheme):
    wide = normal(40, 300)
    for weight in (
        wide[:, 40:168],
        wide[:, 40:168].bfloat16(),
        wide.t()[:128].t(),
        wide[:, :128].half(),
        wide[::3, :128].double(),
    ):
        for isa in ISAS:
            assert_native_is_torch(weight, scheme, isa)
        expected, found = reference(weight, scheme), quantize_weight(weight, scheme)
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.scale, expected.scale)


@pytest.mark.parametrize("scale_dtype", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_whole_result_is_that_of_torch_when_worked_on_in_chunks(scheme, scale_dtype, monkeypatch):
    monkeypatch.setattr(quantize, "_NATIVE_CHUNK_WEIGHTS", 10 * 384)
    weight = normal(37, 384, dtype=torch.bfloat16)
    expected, found = reference(weight, scheme, scale_dtype), quantize_weight(weight, scheme, scale_dtype)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scale, expected.scale)
    assert found.levels == expected.levels
    assert (found.offset is None) == (expected.offset is None)
    if found.offset is not None:
        assert torch.equal(found.offset, expected.offset)
    assert sqnr_db(weight, found) > 15


def resident_kib(path):
    """Return how much of a mapped file is in this process's memory."""
    total, is_inside = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if "-" in line.split()[0]:
                is_inside = line.rstrip().endswith(str(path))
            elif is_inside and line.startswith("Rss:"):
                total += int(line.split()[1])
    return total


@pytest.mark.parametrize("scheme", [Scheme("nonlinear"), INT8], ids=name_of)
def test_pages_of_a_file_are_given_back_and_read_again_when_asked(tmp_path, scheme):
    path = tmp_path / "model.safetensors"
    save_file({"w": normal(512, 2048, dtype=torch.bfloat16)}, path)
    weight = load_file(path)["w"]
    if weight.untyped_storage().resizable():
        pytest.skip("this version of safetensors does not map files")
    expected, quantizer = reference(weight, scheme), native_quantizer(native, scheme)
    codes = torch.empty(512, 2048, dtype=torch.int8)
    quantizer.encode(weight, expected.scale, None, codes)
    assert resident_kib(path) > 1900
    codes.fill_(99)
    quantizer.encode(weight, expected.scale, None, codes, is_forgotten=True)
    assert resident_kib(path) < 200
    assert torch.equal(codes, expected.codes)
    assert torch.equal(weight, normal(512, 2048, dtype=torch.bfloat16))


def test_memory_of_numpy_stays_when_it_is_quantised():
    array = np.random.default_rng(0).standard_normal((64, 4096)).astype(np.float32)
    before = array.copy()
    quantize_weight(torch.from_numpy(array), INT8)
    np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize("isa", ISAS)
def test_lanes_are_those_of_numpy_when_rounded_up_and_looked_up(isa):
    if not hasattr(native, "simd"):
        pytest.skip("built without the elementwise component")
    edges = [
        0.0,
        -0.0,
        0.25,
        -0.25,
        1e-45,
        -1e-45,
        7.0,
        -8.5,
        2147483520.0,
        -2147483648.0,
        3e9,
        -3e9,
        np.inf,
        -np.inf,
        np.nan,
        1.5,
    ]
    x = np.array(edges, np.float32)
    out = np.zeros(16, np.int32)
    native.simd("to_i32_up", x.ctypes.data, 0, 0, out.ctypes.data, 1, isa)
    expected = [0, 0, 1, 0, 1, 0, 7, -8, 2147483520, -(2**31), -(2**31), -(2**31), -(2**31), -(2**31), -(2**31), 2]
    assert out.tolist() == expected
    table = nearest_table(NONLINEAR_LEVELS).numpy()
    for first in range(-256, 256, 16):
        index, found = np.arange(first, first + 16, dtype=np.int32), np.zeros(16, np.float32)
        native.simd("at_step", index.ctypes.data, table.ctypes.data, 0, found.ctypes.data, 1, isa)
        np.testing.assert_array_equal(found, table[first + 256 : first + 272])


def test_what_the_kernels_do_not_do_is_refused():
    with pytest.raises(ValueError, match="32, 64 or 128"):
        native.QuantizeRows("linear", True, 0, 96, 1, 96, 48)
    with pytest.raises(ValueError, match="int8"):
        native.QuantizeRows("int8", True, 0, 96, 1, 96, 32)
    with pytest.raises(ValueError, match="nf4"):
        native.QuantizeRows("nf4", True, 0, 96, 1, 96, 32)
    with pytest.raises(ValueError, match="8 apart"):
        native_quantizer_of_close_levels().search(normal(1, 32))
    with pytest.raises(ValueError, match="avx7"):
        native_quantizer(native, INT8, "avx7").search(normal(1, 32))


def native_quantizer_of_close_levels():
    from quire.kernels.cpu.quantization import NativeQuantizer

    return NativeQuantizer(native, "nonlinear", 32, torch.ones(1), -8, nearest_table(tuple(range(-8, 8))))
