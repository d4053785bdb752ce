"""Recurrent mixers on a GPU: causal convolutions and states with decay; quire.kernels.reference.recurrent is their reference.

A program takes one sequence through its tokens in turn, for a part of its channels or of its state. Its result does not
depend on how a prompt is cut, nor on what else is in the step. The state of a sequence is a row of a pool; a program has read
its part of the row from which the sequence starts before it writes any.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.base.errors import InvariantError
from quire.kernels.reference.recurrent import Recurrence
from quire.kernels.triton.arithmetic import cast_to
from quire.kernels.triton.launching import Launch, check_contiguous, check_tensor
from quire.kernels.triton.sizes import power_of_two
from quire.kernels.triton.step import DeviceStateRows

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_TAPS = 4
_CHANNELS = 128
_STATE_VALUES = 4096
_SCALAR, _BY_ROW, _BY_RATES = range(3)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, query_starts: Tensor, rows: DeviceStateRows
) -> Tensor:
    """Convolve each channel over the tokens of each sequence; the taps are summed in f32, in order.

    x             [T, C] with contiguous rows
    weight        [C, K] with K at most MAX_TAPS, the last tap is that of the token itself; bias [C]
    pool          [rows, C, K - 1] in the dtype of x, the last inputs, oldest first
    query_starts  [S + 1] i32
    Returns       [T, C] in the dtype of x
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    causal_conv_launch(out, x, weight, bias, pool, query_starts, rows).run()
    return out


def causal_conv_launch(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, query_starts: Tensor, rows: DeviceStateRows
) -> Launch:
    """Return the launch of causal_conv, which writes the contiguous `out`."""
    num_channels, num_taps = weight.shape
    if not 2 <= num_taps <= MAX_TAPS:
        raise InvariantError(f"a convolution must have 2 to {MAX_TAPS} taps, got {num_taps}")
    check_tensor("x", x, (None, num_channels), *_FLOATS)
    check_contiguous("out", out, tuple(x.shape), x.dtype)
    check_contiguous("weight", weight, (num_channels, num_taps), *_FLOATS)
    check_contiguous("pool", pool, (None, num_channels, num_taps - 1), x.dtype)
    arguments = {
        "x_ptr": x,
        "weight_ptr": weight,
        "bias_ptr": bias,
        "out_ptr": out,
        "pool_ptr": pool,
        "starts_ptr": query_starts,
        "sources_ptr": rows.sources,
        "saves_ptr": rows.saves,
        "checkpoints_ptr": rows.checkpoints,
        "x_stride": x.stride(0),
    }
    constants = {"CHANNELS": num_channels, "TAPS": num_taps, "BLOCK": _CHANNELS}
    grid = (len(query_starts) - 1, triton.cdiv(num_channels, _CHANNELS))
    return Launch(_causal_conv, grid, arguments, constants, num_warps=_CHANNELS // 32, num_stages=1, is_fused=False)


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


def recur(inputs: Recurrence, pool: Tensor, query_starts: Tensor, rows: DeviceStateRows) -> Tensor:
    """Take the states of sequences through their tokens.

    pool          [rows, Hv, Dk, Dv] f32
    query_starts  [S + 1] i32
    Returns       the output of each token [T, Hv, Dv] f32
    """
    out = torch.empty(inputs.v.shape, dtype=torch.float32, device=inputs.v.device)
    recur_launch(out, inputs, pool, query_starts, rows).run()
    return out


def recur_launch(out: Tensor, inputs: Recurrence, pool: Tensor, query_starts: Tensor, rows: DeviceStateRows) -> Launch:
    """Return the launch of recur, which writes the contiguous `out`."""
    num_heads, k_dim, v_dim = inputs.state_shape
    num_tokens, num_k_heads, _ = inputs.q.shape
    q, k, v, decay = (part.contiguous() for part in (inputs.q, inputs.k, inputs.v, inputs.decay))
    beta = None if inputs.beta is None else inputs.beta.contiguous()
    rates = None if inputs.rates is None else inputs.rates.contiguous()
    for name, part in {"q": q, "k": k}.items():
        check_contiguous(name, part, (num_tokens, num_k_heads, k_dim), torch.float32)
    for name, part in {"v": v, "out": out}.items():
        check_contiguous(name, part, (num_tokens, num_heads, v_dim), torch.float32)
    if not pool.is_contiguous() or pool.numel() != len(pool) * num_heads * k_dim * v_dim or pool.dtype != torch.float32:
        raise InvariantError(
            f"pool must be [rows, {num_heads}, {k_dim}, {v_dim}] of float32 in one piece, got {tuple(pool.shape)}"
        )
    kind = _BY_RATES if rates is not None else _SCALAR if decay.ndim == 2 else _BY_ROW
    block_k = power_of_two(k_dim)
    block_v = min(power_of_two(v_dim), max(16, _STATE_VALUES // block_k))
    arguments = {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "decay_ptr": decay,
        "beta_ptr": beta,
        "rates_ptr": rates,
        "out_ptr": out,
        "pool_ptr": pool,
        "starts_ptr": query_starts,
        "sources_ptr": rows.sources,
        "saves_ptr": rows.saves,
        "checkpoints_ptr": rows.checkpoints,
    }
    constants = {
        "HEADS": num_heads,
        "SHARED": num_heads // num_k_heads,
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "BLOCK_K": block_k,
        "BLOCK_V": block_v,
        "KIND": kind,
    }
    grid = (len(query_starts) - 1, num_heads, triton.cdiv(v_dim, block_v))
    return Launch(_recur, grid, arguments, constants, num_warps=4, num_stages=1)


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
