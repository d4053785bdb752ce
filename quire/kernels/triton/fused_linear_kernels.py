"""Device code of linear layers for few tokens: one pass over the weights, with norm, activation and residual.

A program handles a few rows of the weight with all their columns, so that small weights fill the device, too, and no sum is
split over programs. Different warps multiply the SPLITS parts of a tile of BLOCK_K columns; their sums are added at the end.
The first EARLY tiles are loaded before the wait for the previous launch.

One token is multiplied by ordinary arithmetic: threads keep sums of _RUN columns each. Several are multiplied by tensor cores,
with the rows of the weight as M where a program has 16 or more, else the tokens. The order of a sum depends on the tile, which
depends on the weight's shape and the padded number of tokens, not on other tokens.
"""
# ruff: noqa: RUF005 - Triton concatenates tuples, and does not unpack them

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.activation_kernels import activated
from quire.kernels.triton.arithmetic import cast_to, dot, rounded
from quire.kernels.triton.norm_kernels import scale_normalized
from quire.kernels.triton.pdl import launch_dependents, prefetch, wait

_RUN = tl.constexpr(8)


@triton.jit
def weight_rows(first: tl.tensor, lanes: tl.tensor, NUM_ROWS: tl.constexpr, IS_GATED: tl.constexpr) -> tl.tensor:
    """Return the weight's rows; gate and up rows alternate, so that a program has both halves of its outputs."""
    rows = first + lanes
    if IS_GATED:
        rows = rows // 2 + rows % 2 * (NUM_ROWS // 2)
    return rows


@triton.jit
def _load_columns(
    ptrs: tl.tensor, is_row: tl.tensor, columns: tl.tensor, first: tl.tensor, NUM_COLUMNS: tl.constexpr
) -> tl.tensor:
    """Return [SPLITS, rows, BLOCK_K / SPLITS] from columns `first` on, zeros where there is nothing.

    ptrs     [rows] of the first column of each row
    columns  [SPLITS, BLOCK_K / SPLITS] of a tile
    """
    mask = is_row[None, :, None] & (first + columns < NUM_COLUMNS)[:, None, :]
    return tl.load(ptrs[None, :, None] + (first + columns)[:, None, :], mask=mask, other=0.0)


@triton.jit
def _add_products(
    acc: tl.tensor,
    weight: tl.tensor,
    x: tl.tensor,
    factors: tl.tensor,
    norm_weight: tl.tensor,
    TOKENS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    CASTS_LATE: tl.constexpr,
) -> tl.tensor:
    """Return acc with the products of a tile added.

    weight [SPLITS, rows, K], x [SPLITS, TOKENS, K], factors [TOKENS] of the norm, norm_weight [SPLITS, 1, K]
    """
    DTYPE: tl.constexpr = x.dtype
    if HAS_NORM:
        wide = x.to(tl.float32) * factors[None, :, None]
        x = cast_to(scale_normalized(wide, norm_weight.to(tl.float32), OFFSET, CASTS_LATE, DTYPE), DTYPE)
    if TOKENS == 1:
        products = weight.to(tl.float32) * x.to(tl.float32)
        SHAPE: tl.constexpr = [products.shape[0], products.shape[1], products.shape[2] // _RUN, _RUN]
        acc += tl.sum(tl.reshape(products, SHAPE), 3)
    elif weight.shape[1] < 16:
        acc = dot(x, tl.permute(weight, (0, 2, 1)), acc)
    else:
        acc = dot(weight, tl.permute(x, (0, 2, 1)), acc)
    return acc


@triton.jit
def _write(
    y: tl.tensor,
    rows: tl.tensor,
    first_row: tl.tensor,
    is_row: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    residual_scale: tl.tensor,
    NUM_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_SCALED: tl.constexpr,
) -> None:
    """Write the products y [TOKENS, BLOCK_N], f32, with the operations after them."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = NUM_ROWS // 2 if IS_GATED else NUM_ROWS
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[None, :]
    y = rounded(y, DTYPE)
    if IS_GATED:
        gate, up = tl.split(tl.reshape(y, [TOKENS, BLOCK_N // 2, 2]))
        y = rounded(activated(gate, KIND), DTYPE) * up
        outputs = first_row // 2 + tl.arange(0, BLOCK_N // 2)
    else:
        if KIND >= 0:
            y = activated(y, KIND)
        outputs = rows
    tokens = tl.arange(0, TOKENS)
    out = out_ptr + tokens[:, None] * WIDTH + outputs[None, :]
    mask = (tokens < num_tokens)[:, None] & (outputs < WIDTH)[None, :]
    if HAS_RESIDUAL:
        if IS_SCALED:
            y = rounded(y * residual_scale, DTYPE)
        y = tl.load(out, mask=mask, other=0.0).to(tl.float32) + y
    tl.store(out, cast_to(y, DTYPE), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "residual_scale"])
def fused_linear(
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
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
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
    """Write BLOCK_N rows of the weight times every token; see fused_linear.fused_linear_launch.

    TOKENS         1, or at least 8
    KIND           of activation.activated; -1: none
    FETCHED_BYTES  prefetched bytes of each row, after its EARLY tiles
    """
    launch_dependents(IS_PDL)
    FIRST_LATE: tl.constexpr = EARLY * BLOCK_K
    HAS_NORM: tl.constexpr = norm_weight_ptr is not None
    WIDTH: tl.constexpr = BLOCK_K // SPLITS
    first_row = tl.program_id(0) * BLOCK_N
    lanes = tl.arange(0, BLOCK_N)
    rows = weight_rows(first_row, lanes, NUM_ROWS, IS_GATED)
    is_row = first_row + lanes < NUM_ROWS
    columns = tl.arange(0, SPLITS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    row_ptrs = weight_ptr + rows.to(tl.int64) * NUM_COLUMNS
    norm_row = norm_weight_ptr + tl.arange(0, 1) if HAS_NORM else None
    is_norm = tl.arange(0, 1) == 0
    weights, norm_weights = (), ()
    for tile in tl.static_range(EARLY):
        weights = weights + (_load_columns(row_ptrs, is_row, columns, tile * BLOCK_K, NUM_COLUMNS),)
        if HAS_NORM:
            norm_weights = norm_weights + (_load_columns(norm_row, is_norm, columns, tile * BLOCK_K, NUM_COLUMNS),)
    if FETCHED_BYTES > 0:
        threads = tl.arange(0, THREADS)
        fetched = weight_rows(first_row, threads, NUM_ROWS, IS_GATED)
        is_fetched = (threads < BLOCK_N) & (first_row + threads < NUM_ROWS)
        prefetch(weight_ptr + fetched.to(tl.int64) * NUM_COLUMNS + FIRST_LATE, is_fetched, FETCHED_BYTES, IS_PDL)
    wait(IS_PDL)

    tokens = tl.arange(0, TOKENS)
    token_rows = x_ptr + tokens * x_stride
    is_token = tokens < num_tokens
    rows_of_x = ()
    for tile in tl.static_range(EARLY):
        rows_of_x = rows_of_x + (_load_columns(token_rows, is_token, columns, tile * BLOCK_K, NUM_COLUMNS),)
    factors = tl.zeros([TOKENS], tl.float32)
    if HAS_NORM:
        squares = tl.zeros([SPLITS, TOKENS, WIDTH], tl.float32)
        for tile in tl.static_range(EARLY):
            wide = rows_of_x[tile].to(tl.float32)
            squares += wide * wide
        for first in tl.static_range(FIRST_LATE, NUM_COLUMNS, BLOCK_K):
            wide = _load_columns(token_rows, is_token, columns, first, NUM_COLUMNS).to(tl.float32)
            squares += wide * wide
        factors = tl.rsqrt(tl.sum(tl.sum(squares, 2), 0) / NUM_COLUMNS + EPS)
    IS_LONG: tl.constexpr = TOKENS == 1 or BLOCK_N >= 16
    if IS_LONG:
        acc = tl.zeros([SPLITS, BLOCK_N, WIDTH // _RUN if TOKENS == 1 else TOKENS], tl.float32)
    else:
        acc = tl.zeros([SPLITS, TOKENS, BLOCK_N], tl.float32)
    for tile in tl.static_range(EARLY):
        norm_weight = norm_weights[tile] if HAS_NORM else factors
        acc = _add_products(acc, weights[tile], rows_of_x[tile], factors, norm_weight, TOKENS, HAS_NORM, OFFSET, CASTS_LATE)
    if FIRST_LATE < NUM_COLUMNS:
        for first in tl.range(FIRST_LATE, NUM_COLUMNS, BLOCK_K, num_stages=NUM_STAGES):
            weight = _load_columns(row_ptrs, is_row, columns, first, NUM_COLUMNS)
            x = _load_columns(token_rows, is_token, columns, first, NUM_COLUMNS)
            late = _load_columns(norm_row, is_norm, columns, first, NUM_COLUMNS) if HAS_NORM else factors
            acc = _add_products(acc, weight, x, factors, late, TOKENS, HAS_NORM, OFFSET, CASTS_LATE)

    if TOKENS == 1:
        y = tl.reshape(tl.sum(tl.sum(acc, 2), 0), [1, BLOCK_N])
    else:
        y = tl.sum(acc, 0)
        if IS_LONG:
            y = tl.trans(y)
    _write(
        y, rows, first_row, is_row, bias_ptr, out_ptr, num_tokens, residual_scale,
        NUM_ROWS, TOKENS, BLOCK_N, KIND, IS_GATED, HAS_RESIDUAL, IS_SCALED,
    )  # fmt: skip
