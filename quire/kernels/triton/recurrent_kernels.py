"""Kernels of recurrent.py: causal convolutions and linear recurrences."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import cast_to


@triton.jit
def _causal_conv(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    saves_ptr: tl.tensor,
    checkpoints_ptr: tl.tensor,
    x_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < CHANNELS
    source = tl.load(sources_ptr + sequence).to(tl.int64)
    stored = channels < tl.where(source >= 0, CHANNELS, 0)
    state_ptr = pool_ptr + (source * CHANNELS + channels) * (TAPS - 1)
    weights_ptr = weight_ptr + channels * TAPS
    # The inputs of the last three tokens, and their taps; the oldest ones are left out where there are fewer taps.
    third, second = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    third_tap, second_tap = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    if TAPS >= 4:
        third = tl.load(state_ptr + TAPS - 4, mask=stored, other=0.0).to(tl.float32)
        third_tap = tl.load(weights_ptr + TAPS - 4, mask=mask, other=0.0).to(tl.float32)
    if TAPS >= 3:
        second = tl.load(state_ptr + TAPS - 3, mask=stored, other=0.0).to(tl.float32)
        second_tap = tl.load(weights_ptr + TAPS - 3, mask=mask, other=0.0).to(tl.float32)
    first = tl.load(state_ptr + TAPS - 2, mask=stored, other=0.0).to(tl.float32)
    first_tap = tl.load(weights_ptr + TAPS - 2, mask=mask, other=0.0).to(tl.float32)
    own_tap = tl.load(weights_ptr + TAPS - 1, mask=mask, other=0.0).to(tl.float32)
    start = tl.load(starts_ptr + sequence)
    for step in range(tl.load(starts_ptr + sequence + 1) - start):
        token = start.to(tl.int64) + step
        x = tl.load(x_ptr + token * x_stride + channels, mask=mask, other=0.0).to(tl.float32)
        total = third * third_tap
        total += second * second_tap
        total += first * first_tap
        total += x * own_tap
        if bias_ptr is not None:
            total += tl.load(bias_ptr + channels, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + token * CHANNELS + channels, cast_to(total, out_ptr.dtype.element_ty), mask=mask)
        third, second, first = second, first, x
        _save_window(pool_ptr, tl.load(saves_ptr + token), channels, third, second, first, CHANNELS, TAPS)
        _save_window(pool_ptr, tl.load(checkpoints_ptr + token), channels, third, second, first, CHANNELS, TAPS)


@triton.jit
def _save_window(
    pool_ptr: tl.tensor,
    row: tl.tensor,
    channels: tl.tensor,
    third: tl.tensor,
    second: tl.tensor,
    first: tl.tensor,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
) -> None:
    """Store the last inputs in a row of the pool, if it is not negative."""
    mask = channels < tl.where(row >= 0, CHANNELS, 0)
    state_ptr = pool_ptr + (row.to(tl.int64) * CHANNELS + channels) * (TAPS - 1)
    if TAPS >= 4:
        tl.store(state_ptr + TAPS - 4, cast_to(third, pool_ptr.dtype.element_ty), mask=mask)
    if TAPS >= 3:
        tl.store(state_ptr + TAPS - 3, cast_to(second, pool_ptr.dtype.element_ty), mask=mask)
    tl.store(state_ptr + TAPS - 2, cast_to(first, pool_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _recur(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    rates_ptr: tl.tensor,
    out_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    saves_ptr: tl.tensor,
    checkpoints_ptr: tl.tensor,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    sequence, head = tl.program_id(0), tl.program_id(1)
    ks = tl.arange(0, BLOCK_K)
    vs = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_mask, v_mask = ks < K_DIM, vs < V_DIM
    places = ks[:, None] * V_DIM + vs[None, :]
    mask = k_mask[:, None] & v_mask[None, :]
    source = tl.load(sources_ptr + sequence).to(tl.int64)
    stored = (ks < tl.where(source >= 0, K_DIM, 0))[:, None] & v_mask[None, :]
    state = tl.load(pool_ptr + (source * HEADS + head) * (K_DIM * V_DIM) + places, mask=stored, other=0.0)
    if KIND == 2:
        rates = tl.load(rates_ptr + head * (K_DIM * V_DIM) + places, mask=mask, other=0.0)
    start = tl.load(starts_ptr + sequence)
    for step in range(tl.load(starts_ptr + sequence + 1) - start):
        token = start.to(tl.int64) + step
        place = token * HEADS + head
        key_place = (token * (HEADS // SHARED) + head // SHARED) * K_DIM
        k = tl.load(k_ptr + key_place + ks, mask=k_mask, other=0.0)
        q = tl.load(q_ptr + key_place + ks, mask=k_mask, other=0.0)
        v = tl.load(v_ptr + place * V_DIM + vs, mask=v_mask, other=0.0)
        if KIND == 0:
            state = state * tl.load(decay_ptr + place)
        elif KIND == 1:
            state = state * tl.load(decay_ptr + place * K_DIM + ks, mask=k_mask, other=0.0)[:, None]
        else:
            decay = tl.load(decay_ptr + place * V_DIM + vs, mask=v_mask, other=0.0)
            state = state * tl.exp(rates * decay[None, :])
        if beta_ptr is not None:
            v = (v - tl.sum(state * k[:, None], 0)) * tl.load(beta_ptr + place)
        state = state + k[:, None] * v[None, :]
        tl.store(out_ptr + place * V_DIM + vs, tl.sum(state * q[:, None], 0), mask=v_mask)
        _save_state(pool_ptr, tl.load(saves_ptr + token), head, state, places, mask, HEADS, K_DIM * V_DIM)
        _save_state(pool_ptr, tl.load(checkpoints_ptr + token), head, state, places, mask, HEADS, K_DIM * V_DIM)


@triton.jit
def _save_state(
    pool_ptr: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    state: tl.tensor,
    places: tl.tensor,
    mask: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Store a part of a state in a row of the pool, if that is not negative."""
    if row >= 0:
        tl.store(pool_ptr + (row.to(tl.int64) * HEADS + head) * SIZE + places, state, mask=mask)
