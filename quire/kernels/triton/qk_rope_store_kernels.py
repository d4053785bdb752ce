"""Kernels of qk_rope_store.py: norm of q and k, rotary embedding, and the store of k and v."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import cast_to, round_to_integer, rounded
from quire.kernels.triton.norm_kernels import scale_normalized
from quire.kernels.triton.rotated_codes_kernels import quantize_rotated, rotate


@triton.jit
def load_heads(
    ptr: tl.tensor,
    heads: tl.tensor,
    is_head: tl.tensor,
    weight_ptr: tl.tensor,
    table_ptr: tl.tensor,
    position: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    IS_ROPE_F32: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CASTS_LATE: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Return heads [N, BLOCK_D] of a token, normalised and rotated, f32 values of DTYPE."""
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    mask = is_head[:, None] & is_dim[None, :]
    # What all heads share is loaded for each of them: else it would go through shared memory, with barriers.
    lanes = tl.zeros([heads.shape[0] if heads.shape[0] <= 8 else 1, 1], tl.int32)
    x = tl.load(ptr + heads[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        factor = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + EPS)[:, None]
        weight = tl.load(weight_ptr + lanes + dims[None, :], mask=is_dim[None, :], other=0.0).to(tl.float32)
        x = rounded(scale_normalized(x * factor, weight, OFFSET, CASTS_LATE, DTYPE), DTYPE)
    if table_ptr is not None:
        HALF: tl.constexpr = ROPE_DIM // 2
        # The other element of each pair is loaded again instead of being moved between threads.
        other = tl.where(dims < HALF, dims + HALF, tl.where(dims < ROPE_DIM, dims - HALF, dims))
        y = tl.load(ptr + heads[:, None] * HEAD_DIM + other[None, :], mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + lanes + other[None, :], mask=is_dim[None, :], other=0.0).to(tl.float32)
            y = rounded(scale_normalized(y * factor, weight, OFFSET, CASTS_LATE, DTYPE), DTYPE)
        angle = table_ptr + position * ROPE_DIM + (lanes + (dims % HALF)[None, :])
        is_rotated = (dims < ROPE_DIM)[None, :]
        cos = tl.load(angle, mask=is_rotated, other=1.0)
        sin = tl.load(angle + HALF, mask=is_rotated, other=0.0)
        sin = tl.where((dims < HALF)[None, :], -sin, sin)
        if IS_ROPE_F32:
            x = rounded(x * cos + y * sin, DTYPE)
        else:
            x = rounded(rounded(x * cos, DTYPE) + rounded(y * sin, DTYPE), DTYPE)
    return x


@triton.jit
def store_heads(
    x: tl.tensor,
    cache_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    rows: tl.tensor,
    is_head: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    dims = tl.arange(0, BLOCK_D)
    mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    places = cache_ptr + rows[:, None] * HEAD_DIM + dims[None, :]
    if cache_ptr.dtype.element_ty == tl.uint8:
        codes, scales = quantize_rotated(x)
        tl.store(scales_ptr + rows, scales, mask=is_head)
        packed = rows[:, None] * (HEAD_DIM // 2) + tl.arange(0, HEAD_DIM // 2)[None, :]
        tl.store(cache_ptr + packed, codes, mask=is_head[:, None])
    elif LARGEST > 0:
        # The maximum ignores NaN, which would be stored as a number, and a failed sequence would continue: its scale is NaN.
        has_nan = tl.max((x != x).to(tl.int32), 1) > 0
        size = tl.where(has_nan, float("nan"), tl.max(tl.abs(x), 1))
        tl.store(scales_ptr + rows, size * (1.0 / LARGEST), mask=is_head)
        x = tl.where(has_nan[:, None], 0.0, x * tl.where(size > 0, LARGEST / size, 0.0)[:, None])
        if cache_ptr.dtype.element_ty == tl.int8:
            tl.store(places, round_to_integer(x).to(tl.int8), mask=mask)
        else:
            tl.store(places, cast_to(x, cache_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(places, cast_to(x, cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _place_heads(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    k_scales_ptr: tl.tensor,
    v_scales_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    table_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    IS_ROPE_F32: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CASTS_LATE: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """Process heads program_id(1) of token program_id(0): those of q first, then k, then v, BLOCK_H at a time."""
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    Q_GROUPS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    KV_GROUPS: tl.constexpr = (NUM_KV_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    position = tl.load(positions_ptr + token).to(tl.int64)
    lanes = tl.arange(0, BLOCK_H)
    if group < Q_GROUPS:
        heads = group * BLOCK_H + lanes
        is_head = heads < NUM_HEADS
        x = load_heads(
            q_ptr + token * q_stride, heads, is_head, q_weight_ptr, table_ptr, position,
            HEAD_DIM, BLOCK_D, ROPE_DIM, IS_ROPE_F32, EPS, OFFSET, CASTS_LATE, DTYPE,
        )  # fmt: skip
        if k_cache_ptr.dtype.element_ty == tl.uint8:
            x = rotate(x)
        store_heads(x, out_ptr, None, token * NUM_HEADS + heads, is_head, HEAD_DIM, BLOCK_D, 0.0)
    else:
        slot = tl.load(slots_ptr + token)
        heads = (group - Q_GROUPS) % KV_GROUPS * BLOCK_H + lanes
        is_head = heads < tl.where(slot >= 0, NUM_KV_HEADS, 0)
        rows = (slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
        if group < Q_GROUPS + KV_GROUPS:
            x = load_heads(
                k_ptr + token * k_stride, heads, is_head, k_weight_ptr, table_ptr, position,
                HEAD_DIM, BLOCK_D, ROPE_DIM, IS_ROPE_F32, EPS, OFFSET, CASTS_LATE, DTYPE,
            )  # fmt: skip
            store_heads(x, k_cache_ptr, k_scales_ptr, rows, is_head, HEAD_DIM, BLOCK_D, LARGEST)
        else:
            x = load_heads(
                v_ptr + token * v_stride, heads, is_head, None, None, position,
                VALUE_DIM, BLOCK_D, ROPE_DIM, IS_ROPE_F32, EPS, OFFSET, CASTS_LATE, DTYPE,
            )  # fmt: skip
            store_heads(x, v_cache_ptr, v_scales_ptr, rows, is_head, HEAD_DIM, BLOCK_D, LARGEST)
