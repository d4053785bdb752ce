"""Device functions of the sampling noise and of token masses: the same bits as kernels/reference/noise.py and mass.py.

Kernels that call them are launched without fused multiply-adds (Launch.is_fused).
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import round_to_integer

_SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)
_V_DIRECT = tl.constexpr(0.29289323091506958)
_V_MAX = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def noise_of_run(
    first: tl.tensor, key_low: tl.tensor, key_high: tl.tensor, position: tl.tensor, stream: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return the noise [BLOCK] f32 of the tokens starting at `first`, a multiple of 4; the other arguments are u32 scalars."""
    quads = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    w0, w1, w2, w3 = _words(quads, key_low, key_high, position, stream)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return _gumbel(words)


@triton.jit
def noise_of_tokens(
    tokens: tl.tensor, key_low: tl.tensor, key_high: tl.tensor, position: tl.tensor, stream: tl.tensor
) -> tl.tensor:
    """Return the noise [N] f32 of arbitrary tokens [N] i32; the other arguments are u32 scalars."""
    w0, w1, w2, w3 = _words((tokens >> 2).to(tl.uint32), key_low, key_high, position, stream)
    place = tokens & 3
    return _gumbel(tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3)))


@triton.jit
def fixed_point_exp(depth: tl.tensor) -> tl.tensor:
    """Return e**depth in units of 2**-44, i64, for depth <= 0 or -inf, f32."""
    x = tl.maximum(depth, -32.0)
    n = round_to_integer(x * 1.44269504)
    r = (x - n * 0.693359375) + n * 2.12194440e-4
    y = r * 1.9875691500e-4 + 1.3981999507e-3
    y = y * r + 8.3334519073e-3
    y = y * r + 4.1665795894e-2
    y = y * r + 1.6666665459e-1
    y = y * r + 5.0000001201e-1
    y = y * (r * r) + (r + 1.0)
    units = y * ((n.to(tl.int32) + (127 + 44)) << 23).to(tl.float32, bitcast=True)
    # From 2**23 every f32 is an integer; below, the sum has no bits for a fraction.
    return tl.where(units < 8388608.0, (tl.minimum(units, 8388608.0) + 8388608.0) - 8388608.0, units).to(tl.int64)


@triton.jit
def _words(
    quads: tl.tensor, key_low: tl.tensor, key_high: tl.tensor, position: tl.tensor, stream: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    zero = quads * 0
    return tl.philox_impl(quads, zero + position, zero + stream, zero, zero + key_low, zero + key_high, 10)


@triton.jit
def _gumbel(words: tl.tensor) -> tl.tensor:
    v = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, _V_MAX)
    fraction, exponent = _split(1.0 - v)
    is_direct = v <= _V_DIRECT
    exponential = -_log_polynomial(tl.where(is_direct, -v, fraction), tl.where(is_direct, 0.0, exponent))
    fraction, exponent = _split(exponential)
    return -_log_polynomial(fraction, exponent)


@triton.jit
def _split(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return (m - 1, e), f32, with x = m * 2**e; x positive and normal."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    return mantissa - 1.0, exponent.to(tl.float32)


@triton.jit
def _log_polynomial(f: tl.tensor, e: tl.tensor) -> tl.tensor:
    """Return ln((1 + f) * 2**e)."""
    z = f * f
    y = f * 7.0376836292e-2 + -1.1514610310e-1
    y = y * f + 1.1676998740e-1
    y = y * f + -1.2420140846e-1
    y = y * f + 1.4249322787e-1
    y = y * f + -1.6668057665e-1
    y = y * f + 2.0000714765e-1
    y = y * f + -2.4999993993e-1
    y = y * f + 3.3333331174e-1
    y = (y * f) * z
    y = y + e * -2.12194440e-4
    y = y - z * 0.5
    return (f + y) + e * 0.693359375
