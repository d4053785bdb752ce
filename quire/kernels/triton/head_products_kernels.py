"""Kernel of head_products.py: products with a matrix for each head."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import cast_to, dot


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
