"""Products with a matrix of its own for each head, as latent attention has them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.base.errors import InvariantError
from quire.kernels.triton.arithmetic import cast_to, dot
from quire.kernels.triton.launching import Launch, check_tensor
from quire.kernels.triton.sizes import power_of_two

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TOKENS, _OUTPUTS, _INPUTS = 16, 64, 64
"""Of a tile. The inputs that are taken at once determine the order of sums."""


def multiply_heads(x: Tensor, weights: Tensor, is_in_order: bool = False) -> Tensor:
    """Return x[:, h] @ weights[h] for each head h.

    x            [T, H, K] float, the last dimension contiguous
    weights      [H, K, N] in x's dtype, of any strides
    is_in_order  batch-invariant: a row has the same bits for any number of rows; otherwise torch multiplies
    Returns      [T, H, N] in x's dtype

    Raises InvariantError for shapes and dtypes that do not match.
    """
    if not is_in_order:
        return torch.bmm(x.transpose(0, 1), weights).transpose(0, 1)
    out = torch.empty(*x.shape[:2], weights.shape[2], dtype=x.dtype, device=x.device)
    multiply_heads_launch(out, x, weights).run()
    return out


def multiply_heads_launch(out: Tensor, x: Tensor, weights: Tensor) -> Launch:
    """Return the launch of a batch-invariant `multiply_heads`, which writes `out`."""
    num_tokens, num_heads, num_inputs = x.shape
    check_tensor("x", x, (None, None, None), *_FLOATS)
    check_tensor("out", out, (num_tokens, num_heads, weights.shape[2]), x.dtype)
    if weights.shape[:2] != (num_heads, num_inputs) or weights.dtype != x.dtype:
        raise InvariantError(f"weights of {num_heads} heads of {num_inputs} inputs, got {tuple(weights.shape)} {weights.dtype}")
    strides = {"x_token": x.stride(0), "x_head": x.stride(1), "out_token": out.stride(0), "out_head": out.stride(1)}
    strides |= {"weight_head": weights.stride(0), "weight_input": weights.stride(1), "weight_output": weights.stride(2)}
    arguments = {"x_ptr": x, "weights_ptr": weights, "out_ptr": out, "num_tokens": num_tokens, **strides}
    num_outputs = weights.shape[2]
    constants = {
        "NUM_INPUTS": num_inputs,
        "NUM_OUTPUTS": num_outputs,
        "BLOCK_T": _TOKENS,
        "BLOCK_N": min(_OUTPUTS, power_of_two(num_outputs, 16)),
        "BLOCK_K": min(_INPUTS, power_of_two(num_inputs, 16)),
    }
    grid = triton.cdiv(num_tokens, _TOKENS), triton.cdiv(num_outputs, constants["BLOCK_N"]), num_heads
    return Launch(_multiply_heads, grid, arguments, constants, num_warps=4, num_stages=2)


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_heads(
    x_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    weight_head: tl.tensor,
    weight_input: tl.tensor,
    weight_output: tl.tensor,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute outputs program_id(1) of tokens program_id(0) for head program_id(2), a tile of each."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2).to(tl.int64)
    is_token, is_output = (tokens < num_tokens)[:, None], (outputs < NUM_OUTPUTS)[None, :]
    rows = x_ptr + head * x_head + tokens.to(tl.int64)[:, None] * x_token
    columns = weights_ptr + head * weight_head + outputs[None, :] * weight_output
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for first in tl.range(0, NUM_INPUTS, BLOCK_K):
        inputs = first + tl.arange(0, BLOCK_K)
        is_input = inputs < NUM_INPUTS
        x = tl.load(rows + inputs[None, :], mask=is_token & is_input[None, :], other=0.0)
        weights = tl.load(columns + inputs[:, None] * weight_input, mask=is_input[:, None] & is_output, other=0.0)
        acc = dot(x, weights, acc)
    places = out_ptr + head * out_head + tokens.to(tl.int64)[:, None] * out_token + outputs[None, :]
    tl.store(places, cast_to(acc, out_ptr.dtype.element_ty), mask=is_token & is_output)
