"""Products with a matrix of its own for each head, as latent attention has them."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.kernels.triton.head_products_kernels import _multiply_heads
from quire.kernels.triton.launching import FLOATS, Launch, check_tensor
from quire.kernels.triton.sizes import ceil_divide, power_of_two

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
    check_tensor("x", x, (None, None, None), *FLOATS)
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
    grid = ceil_divide(num_tokens, _TOKENS), ceil_divide(num_outputs, constants["BLOCK_N"]), num_heads
    return Launch(_multiply_heads, grid, arguments, constants, num_warps=4, num_stages=2)
