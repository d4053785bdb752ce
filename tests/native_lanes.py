"""Operations of simd.h over arrays of any length, and floats on which they go wrong. Skips where there is no extension."""

from __future__ import annotations

import numpy as np
import pytest
import torch  # noqa: F401 - before the extension, so that both use one OpenMP runtime

native = pytest.importorskip("quire.kernels.cpu._native", reason="the native kernels are not built")
if not hasattr(native, "simd"):
    pytest.skip("built without the elementwise component", allow_module_level=True)

ISAS = native.supported_isas()

# Numbers on which conversions and comparisons go wrong: zeros, denormals, ties of bf16 and f16, the ends of both, inf and NaN.
# fmt: off
EDGES = np.array([
    0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, 3.4028235e38, -3.4028235e38,
    1.00390625, 1.01171875, 1.00048828125, 1.00146484375, 65504.0, 65519.99, 65520.0, -65520.0, 6.1035156e-05, 6.1e-05,
    5.9604645e-08, 2.9802322e-08, 2.9802326e-08, 3.3961775e38, 3.3961778e38, np.inf, -np.inf, np.nan,
], dtype=np.float32)
# fmt: on


def run(name: str, isa: str, *inputs: np.ndarray, out: np.ndarray, count: int) -> np.ndarray:
    """Run an operation `count` times; `out` is filled by it and returned."""
    arrays = [np.ascontiguousarray(x) for x in inputs]
    addresses = [x.ctypes.data for x in arrays] + [0] * (3 - len(arrays))
    native.simd(name, *addresses, out.ctypes.data, count, isa)
    return out


def lanes(name: str, isa: str, *inputs: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    """Run an operation of sixteen lanes to sixteen lanes over arrays of any length."""
    size = inputs[0].size
    padded = [np.concatenate([x, np.zeros(-size % 16, x.dtype)]) for x in inputs]
    out = np.full(padded[0].size, 77, dtype)
    return run(name, isa, *padded, out=out, count=out.size // 16)[:size]


def random_floats(count: int, seed: int) -> np.ndarray:
    """All bit patterns alike: every exponent, NaN and denormals among them."""
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)


def pairs(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Every pair of edges, and random ones."""
    x, y = np.meshgrid(EDGES, EDGES)
    return np.concatenate([x.ravel(), random_floats(4096, seed)]), np.concatenate([y.ravel(), random_floats(4096, seed + 1)])


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Error in units of the last place of the f32 nearest to `want`, an f64."""
    with np.errstate(over="ignore"):
        near = np.abs(want).astype(np.float32)
    return np.abs(got.astype(np.float64) - want) / np.spacing(np.maximum(near, np.float32(1.1754944e-38))).astype(np.float64)


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Equal bits, and NaN where NaN is wanted, of whatever payload."""
    is_nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), is_nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~is_nan], want.view(np.uint32)[~is_nan])
