"""Kernels of rotated_codes.py: rotation, quantising and packing of codes of four bits."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import cast_to, rounded

_MOST_STAGES = tl.constexpr(11)  # of the largest vector of can_rotate_on_gpu
_SQRT_HALF = tl.constexpr(0.7071067811865476)
# The positive ones of kernels/reference/kv_formats.THRESHOLDS.
_T1, _T2, _T3 = tl.constexpr(0.238525390625), tl.constexpr(0.490234375), tl.constexpr(0.76953125)
_T4, _T5 = tl.constexpr(1.087890625), tl.constexpr(1.45703125)
_T6, _T7 = tl.constexpr(1.890625), tl.constexpr(2.40625)


@triton.jit
def rotation_signs(dims: tl.tensor) -> tl.tensor:
    """Return the signs of a rotation, f32; see kernels/reference/kv_formats.py."""
    bits = (dims + 1).to(tl.uint32) * 0x9E3779B1
    bits = (bits ^ (bits >> 15)) * 0x85EBCA77
    return 1.0 - 2.0 * (bits >> 31).to(tl.float32)


@triton.jit
def hadamard(x: tl.tensor) -> tl.tensor:
    """Return the normalised Hadamard transform of vectors [N, D], f32."""
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    for stage in tl.static_range(0, _MOST_STAGES):
        if (1 << stage) < D:
            pairs = tl.permute(tl.reshape(x, [N, D // (2 << stage), 2, 1 << stage]), [0, 1, 3, 2])
            low, high = tl.split(pairs)
            pairs = tl.join(low + high, low - high) * _SQRT_HALF
            x = tl.reshape(tl.permute(pairs, [0, 1, 3, 2]), [N, D])
    return x


@triton.jit
def rotate(x: tl.tensor) -> tl.tensor:
    """Return vectors [N, D], f32, rotated."""
    return hadamard(x * rotation_signs(tl.arange(0, x.shape[1]))[None, :])


@triton.jit
def levels(codes: tl.tensor) -> tl.tensor:
    """Return the levels of codes, f32; they are exact in bfloat16."""
    c = codes.to(tl.float32) - 7.5
    return rounded(c * 0.23518 + c * c * c * 0.00218, tl.bfloat16)


@triton.jit
def quantize_rotated(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the packed codes [N, D / 2], u8, and the scales [N], f32, of vectors [N, D], f32."""
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    # The maximum ignores NaN, which would be stored as a number, and a failed sequence would continue: its scale is NaN.
    has_nan = tl.max((x != x).to(tl.int32), 1) > 0
    highest = tl.max(tl.abs(x), 1)
    turned = rotate(x / tl.where(highest > 0, highest, 1.0)[:, None])
    squares = tl.sum(turned * turned, 1)
    unit = tl.where(squares > 0, tl.sqrt(D / tl.where(squares > 0, squares, 1.0)), 0.0)
    normal = turned * unit[:, None]
    size = tl.abs(normal)
    code = (size > _T1).to(tl.int32) + (size > _T2).to(tl.int32) + (size > _T3).to(tl.int32) + (size > _T4).to(tl.int32)
    code = code + (size > _T5).to(tl.int32) + (size > _T6).to(tl.int32) + (size > _T7).to(tl.int32)
    code = tl.where(normal > 0, 8 + code, 7 - code)
    level = levels(code)
    scale = highest * (tl.sum(turned * level, 1) / tl.sum(level * level, 1))
    low, high = tl.split(tl.permute(tl.reshape(code, [N, 2, D // 2]), [0, 2, 1]))
    return (low | (high << 4)).to(tl.uint8), tl.where(has_nan, float("nan"), scale)


@triton.jit
def unpack(x: tl.tensor, dims: tl.tensor, HEAD_DIM: tl.constexpr) -> tl.tensor:
    """Return the levels, f32, of bytes [N, D] of which each dim has the byte that holds its code."""
    return levels((x.to(tl.int32) >> (dims // (HEAD_DIM // 2) * 4)[None, :]) & 15)


@triton.jit
def _unrotate_heads(x_ptr: tl.tensor, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr) -> None:
    """Rotate head program_id(1) of token program_id(0) back."""
    row = tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    dims = tl.arange(0, HEAD_DIM)
    places = x_ptr + row * HEAD_DIM + dims[None, :]
    x = hadamard(tl.load(places).to(tl.float32)) * rotation_signs(dims)[None, :]
    tl.store(places, cast_to(x, x_ptr.dtype.element_ty))
