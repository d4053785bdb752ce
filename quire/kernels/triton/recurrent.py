"""Recurrent mixers on a GPU: causal convolutions and states with decay; quire.kernels.reference.recurrent is their reference.

A program processes the tokens of one sequence in turn, for a part of its channels or state. Its result does not depend on how a
prompt is cut, nor on what else is in the step. The state of a sequence is a row of a pool; a program reads its part of the row
from which the sequence starts before it writes any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.kernels.reference.recurrent import Recurrence
from quire.kernels.triton.launching import FLOATS, Launch, check_contiguous, check_tensor
from quire.kernels.triton.recurrent_kernels import _causal_conv, _recur
from quire.kernels.triton.sizes import ceil_divide, power_of_two
from quire.kernels.triton.step import DeviceStateRows

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
    check_tensor("x", x, (None, num_channels), *FLOATS)
    check_contiguous("out", out, tuple(x.shape), x.dtype)
    check_contiguous("weight", weight, (num_channels, num_taps), *FLOATS)
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
    grid = (len(query_starts) - 1, ceil_divide(num_channels, _CHANNELS))
    return Launch(_causal_conv, grid, arguments, constants, num_warps=_CHANNELS // 32, num_stages=1, is_fused=False)


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
    grid = (len(query_starts) - 1, num_heads, ceil_divide(v_dim, block_v))
    return Launch(_recur, grid, arguments, constants, num_warps=4, num_stages=1)
