"""Device functions that compute the same on a GPU and in Triton's interpreter.

The interpreter computes with the bit patterns of bfloat16 and float8 as if they were integers, and truncates when it casts to
them. So kernels widen what they load to f32 at once, multiply matrices only with `dot`, and cast only with `cast_to`. A mask is
never a block of booleans combined with a scalar one, which some versions of the interpreter turn into a number. Kernels use no
libdevice functions, which the interpreter does not support, and inline assembly only beside another version (nibbles.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in the interpreter, decided when triton was imported."""

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, acc: tl.tensor) -> tl.tensor:
    """Return acc + a @ b in f32; f32 operands are not rounded to tf32."""
    if INTERPRETED:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def cast_to(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return x, f32, in a float type, rounded to nearest even; float8e4nv saturates. NaN stays NaN."""
    if dtype == tl.float8e4nv:
        keep_nan: tl.constexpr = tl.PropagateNan.ALL
        x = tl.minimum(tl.maximum(x, -448.0, propagate_nan=keep_nan), 448.0, propagate_nan=keep_nan)
    if INTERPRETED:
        if dtype == tl.bfloat16:
            x = _bfloat16_bits(x).to(tl.bfloat16, bitcast=True)
        elif dtype == tl.float8e4nv:
            x = _float8_bits(x).to(tl.float8e4nv, bitcast=True)
        else:
            x = x.to(dtype)
    else:
        x = x.to(dtype)
    return x


@triton.jit
def to_f32(codes: tl.tensor) -> tl.tensor:
    """Return codes as f32: int8, float8e4nv, or u8, the bits of float8e4nv for GPUs that do not convert these."""
    if codes.dtype == tl.uint8:
        # As bits of an f16 they are smaller by the difference of the exponents' biases, 2**8; the result is exact.
        size = (codes & 0x7F).to(tl.uint16)
        halves = ((codes & 0x80).to(tl.uint16) << 8 | size << 7).to(tl.float16, bitcast=True)
        numbers = tl.where(size == 0x7F, float("nan"), halves.to(tl.float32) * 256.0)
    else:
        numbers = codes.to(tl.float32)
    return numbers


@triton.jit
def rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return x, f32, rounded to a float type but still f32. Kernels round where the checkpoint's original code does."""
    if dtype != tl.float32:
        x = cast_to(x, dtype).to(tl.float32)
    return x


@triton.jit
def round_to_integer(x: tl.tensor) -> tl.tensor:
    """Return x, f32 with |x| < 2**22, rounded to the nearest integer, ties to even.

    If x is a product and multiplies are fused with adds, the exact product is rounded instead of x, in one operation.
    """
    return (x + 12582912.0) - 12582912.0


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Return the hyperbolic tangent with an absolute error of a few 2**-24."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _bfloat16_bits(x: tl.tensor) -> tl.tensor:
    bits = x.to(tl.uint32, bitcast=True)
    up = bits + 0x7FFF + ((bits >> 16) & 1)
    return tl.where(x != x, 0x7FC0, up >> 16).to(tl.uint16)


@triton.jit
def _float8_bits(x: tl.tensor) -> tl.tensor:
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.abs(x)
    bits = size.to(tl.uint32, bitcast=True)
    # Exponents from -6 on are normal: bias 7 instead of 127, three bits of fraction. Below, units of 2**-9.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    tiny = (size * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xFF
    found = tl.where(size < 0.015625, tiny, normal)
    return (sign | tl.where(x != x, 0x7F, found)).to(tl.uint8)
