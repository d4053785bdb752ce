"""Device code of linear layers for few tokens: one pass over the weights, with norm, activation and residual.

A program handles a few rows of the weight and all of their columns, so even a small weight has programs for the whole device
and no sum is split over programs. Its threads keep sums of RUN columns each, which are added at the end. The order of a sum
depends only on the weight's shape.
"""
# ruff: noqa: RUF005 - Triton concatenates tuples, and does not unpack them

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.activation_kernels import activated
from quire.kernels.triton.arithmetic import cast_to, rounded
from quire.kernels.triton.norm_kernels import scale_normalized
from quire.kernels.triton.pdl import begin, fetch, wait


@triton.jit
def _rows(first: tl.tensor, lanes: tl.tensor, NUM_ROWS: tl.constexpr, IS_GATED: tl.constexpr) -> tl.tensor:
    """Return the weight's rows; gate and up rows alternate, so that a program has both halves of its outputs."""
    rows = first + lanes
    if IS_GATED:
        rows = rows // 2 + rows % 2 * (NUM_ROWS // 2)
    return rows


@triton.jit
def _factors(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    num_tokens: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EPS: tl.constexpr,
) -> tl.tuple:
    """Return RMSNorm's factor for each token."""
    factors = ()
    for token in tl.static_range(TOKENS):
        squares = tl.zeros([BLOCK_K], tl.float32)
        for first in tl.static_range(0, NUM_COLUMNS, BLOCK_K):
            columns = first + tl.arange(0, BLOCK_K)
            there = columns < tl.where(token < num_tokens, NUM_COLUMNS, 0)
            x = tl.load(x_ptr + token * x_stride + columns, mask=there, other=0.0).to(tl.float32)
            squares += x * x
        factors = factors + (tl.rsqrt(tl.sum(squares, 0) / NUM_COLUMNS + EPS),)
    return factors


@triton.jit
def _add_products(
    sums: tl.tuple,
    factors: tl.tuple,
    weight: tl.tensor,
    first: tl.tensor,
    x_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    x_stride: tl.tensor,
    num_tokens: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RUN: tl.constexpr,
    OFFSET: tl.constexpr,
    CASTS_LATE: tl.constexpr,
) -> tl.tuple:
    """Return sums, [BLOCK_N, BLOCK_K / RUN] of each token, with the products of columns [first, first + BLOCK_K) added."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    columns = first + tl.arange(0, BLOCK_K)
    wide = weight.to(tl.float32)
    if norm_weight_ptr is not None:
        norm_weight = tl.load(norm_weight_ptr + columns, mask=columns < NUM_COLUMNS, other=0.0).to(tl.float32)
    found = ()
    for token in tl.static_range(TOKENS):
        there = columns < tl.where(token < num_tokens, NUM_COLUMNS, 0)
        x = tl.load(x_ptr + token * x_stride + columns, mask=there, other=0.0).to(tl.float32)
        if norm_weight_ptr is not None:
            x = rounded(scale_normalized(x * factors[token], norm_weight, OFFSET, CASTS_LATE, DTYPE), DTYPE)
        products = tl.reshape(wide * x[None, :], [BLOCK_N, BLOCK_K // RUN, RUN])
        found = found + (sums[token] + tl.sum(products, 2),)
    return found


@triton.jit(do_not_specialize=["num_tokens", "residual_scale"])
def multiply_few(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    num_tokens: tl.tensor,
    residual_scale: tl.tensor,
    NUM_ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RUN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CASTS_LATE: tl.constexpr,
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_SCALED: tl.constexpr,
    THREADS: tl.constexpr,
    FETCHED_BYTES: tl.constexpr,
    IS_PDL: tl.constexpr,
) -> None:
    """Write BLOCK_N rows of the weight times every token; see fused_linear.multiply_few_launch.

    KIND           of activation.activated; -1: none
    FETCHED_BYTES  prefetched bytes of each row, after its first BLOCK_K columns
    """
    begin(IS_PDL)
    first_row = tl.program_id(0) * BLOCK_N
    lanes = tl.arange(0, BLOCK_N)
    rows = _rows(first_row, lanes, NUM_ROWS, IS_GATED)
    is_row = first_row + lanes < NUM_ROWS
    columns = tl.arange(0, BLOCK_K)
    places = weight_ptr + rows.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :]
    weight = tl.load(places, mask=is_row[:, None] & (columns < NUM_COLUMNS)[None, :], other=0.0)
    if FETCHED_BYTES > 0:
        threads = tl.arange(0, THREADS)
        fetched = _rows(first_row, threads, NUM_ROWS, IS_GATED)
        is_fetched = (threads < BLOCK_N) & (first_row + threads < NUM_ROWS)
        fetch(weight_ptr + fetched.to(tl.int64) * NUM_COLUMNS + BLOCK_K, is_fetched, FETCHED_BYTES, IS_PDL)
    wait(IS_PDL)

    factors = ()
    if norm_weight_ptr is not None:
        factors = _factors(x_ptr, x_stride, num_tokens, NUM_COLUMNS, TOKENS, BLOCK_K, EPS)
    sums = ()
    for _ in tl.static_range(TOKENS):
        sums = sums + (tl.zeros([BLOCK_N, BLOCK_K // RUN], tl.float32),)
    sums = _add_products(
        sums, factors, weight, 0, x_ptr, norm_weight_ptr, x_stride, num_tokens,
        NUM_COLUMNS, TOKENS, BLOCK_N, BLOCK_K, RUN, OFFSET, CASTS_LATE,
    )  # fmt: skip
    if NUM_COLUMNS > BLOCK_K:
        for first in tl.range(BLOCK_K, NUM_COLUMNS, BLOCK_K, num_stages=NUM_STAGES):
            mask = is_row[:, None] & (first + columns < NUM_COLUMNS)[None, :]
            weight = tl.load(places + first, mask=mask, other=0.0)
            sums = _add_products(
                sums, factors, weight, first, x_ptr, norm_weight_ptr, x_stride, num_tokens,
                NUM_COLUMNS, TOKENS, BLOCK_N, BLOCK_K, RUN, OFFSET, CASTS_LATE,
            )  # fmt: skip

    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = NUM_ROWS // 2 if IS_GATED else NUM_ROWS
    for token in tl.static_range(TOKENS):
        y = tl.sum(sums[token], 1)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)
        y = rounded(y, DTYPE)
        if IS_GATED:
            gate, up = tl.split(tl.reshape(y, [BLOCK_N // 2, 2]))
            y = rounded(activated(gate, KIND), DTYPE) * up
            outputs = first_row // 2 + tl.arange(0, BLOCK_N // 2)
        else:
            if KIND >= 0:
                y = activated(y, KIND)
            outputs = rows
        out = out_ptr + token * WIDTH + outputs
        mask = outputs < tl.where(token < num_tokens, WIDTH, 0)
        if HAS_RESIDUAL:
            if IS_SCALED:
                y = rounded(y * residual_scale, DTYPE)
            y = tl.load(out, mask=mask, other=0.0).to(tl.float32) + y
        tl.store(out, cast_to(y, DTYPE), mask=mask)
