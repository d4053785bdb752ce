"""Device code of linear layers with float8 weights and activations: quantisation of rows, and the product."""
# ruff: noqa: RUF005 - Triton concatenates tuples, and does not unpack them

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import cast_to, dot
from quire.kernels.triton.pdl import launch_dependents, wait

_LARGEST = tl.constexpr(448.0)
_LEAST = tl.constexpr(1e-30)


@triton.jit(do_not_specialize=["token_stride", "group_stride"])
def quantize_rows(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    x_stride: tl.tensor,
    token_stride: tl.tensor,
    group_stride: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    ROW_CODES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    IS_PDL: tl.constexpr,
) -> None:
    """Write BLOCK_R groups of columns of token program_id(0), each scaled by its maximum magnitude.

    codes   [T, NUM_COLUMNS] float8, rows ROW_CODES apart
    scales  [T, ceil(NUM_COLUMNS / GROUP)] f32 with any strides, the scales of the codes; NaN if a value is not finite
    GROUP   at most BLOCK_C
    """
    NUM_GROUPS: tl.constexpr = (NUM_COLUMNS + GROUP - 1) // GROUP
    launch_dependents(IS_PDL)
    wait(IS_PDL)
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    inner = tl.arange(0, BLOCK_C)
    columns = groups[:, None] * GROUP + inner[None, :]
    mask = (inner < GROUP)[None, :] & (columns < NUM_COLUMNS)
    x = tl.load(x_ptr + token * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    size = tl.max(tl.abs(x), 1)
    # The maximum does not propagate NaN, which the product must.
    num_finite = tl.sum((tl.abs(x) < float("inf")).to(tl.int32), 1)
    size = tl.where(num_finite == BLOCK_C, size, float("nan"))
    tl.store(scales_ptr + token * token_stride + groups * group_stride, size * (1.0 / _LARGEST), mask=groups < NUM_GROUPS)
    x = x * tl.where(size > _LEAST, _LARGEST / size, 0.0)[:, None]
    tl.store(codes_ptr + token * ROW_CODES + columns, cast_to(x, codes_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_steps"])
def multiply_quantized(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_steps: tl.tensor,
    NUM_ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_PDL: tl.constexpr,
) -> None:
    """Write a tile of x @ weight^T (+ bias), [T, NUM_ROWS]; program_id(0) counts GROUPED tiles of tokens, then those of rows.

    x, codes  [T, NUM_COLUMNS] and [NUM_ROWS, NUM_COLUMNS] float8
    x_scales  [T, ceil(NUM_COLUMNS / GROUP)] f32; scales [ceil(NUM_ROWS / SCALE_ROWS), ceil(NUM_COLUMNS / GROUP)] f32
    GROUP     a multiple of BLOCK_K, or NUM_COLUMNS
    PARTS     a tile has PARTS * BLOCK_N rows, to read less from the L2 cache; registers hold BLOCK_N at a time
    num_steps of BLOCK_K columns; not a constant, as short loops would be unrolled and need more registers
    IS_WHOLE  all of them lie within the columns
    IS_SPLIT  program_id(1) is one of several parts of a sum, which are written one after the other

    Tensor cores sum float8 products in fewer bits than f32, so sums of BLOCK_K products are added in f32.
    """
    launch_dependents(IS_PDL)
    NUM_GROUPS: tl.constexpr = (NUM_COLUMNS + GROUP - 1) // GROUP
    HEIGHT: tl.constexpr = PARTS * BLOCK_N
    TILES_N: tl.constexpr = (NUM_ROWS + HEIGHT - 1) // HEIGHT
    # Programs that run at the same time share tokens and rows, which are then in the L2 cache.
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    first_m = tl.program_id(0) // (GROUPED * TILES_N) * GROUPED
    height = tl.minimum(tiles_m - first_m, GROUPED)
    place = tl.program_id(0) % (GROUPED * TILES_N)
    tokens = (first_m + place % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_row = place // height * HEIGHT
    rows = first_row + tl.arange(0, BLOCK_N)
    is_token = tokens < num_tokens
    columns = tl.arange(0, BLOCK_K)
    # Tokens and rows beyond the last one read it again, which takes fewer registers than a mask; they are not written.
    places = tl.minimum(tokens, num_tokens - 1).to(tl.int64)
    x_tile = x_ptr + places[:, None] * NUM_COLUMNS + columns[None, :]
    x_scale_places = x_scales_ptr + places * NUM_GROUPS
    # Where rows share their scales, the product of the scales has one value for each token.
    SHARES_SCALE: tl.constexpr = SCALE_ROWS % BLOCK_N == 0
    start = tl.program_id(1) * (num_steps * BLOCK_K)
    wait(IS_PDL)

    sums = ()
    for _ in tl.static_range(PARTS):
        sums = sums + (tl.zeros([BLOCK_M, BLOCK_N], tl.float32),)
    for step in tl.range(0, num_steps):
        first = start + step * BLOCK_K
        if IS_WHOLE:
            x = tl.load(x_tile + first)
        else:
            is_column = first + columns < NUM_COLUMNS
            x = tl.load(x_tile + first, mask=is_column[None, :], other=0.0)
        if NUM_GROUPS > 1:
            group = tl.minimum(first // GROUP, NUM_GROUPS - 1)
            x_scales = tl.load(x_scale_places + group)
        found = ()
        for part in tl.static_range(PARTS):
            of_part = rows + part * BLOCK_N
            if NUM_ROWS % HEIGHT != 0:
                of_part = tl.minimum(of_part, NUM_ROWS - 1)
            code_places = codes_ptr + (of_part.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :]) + first
            codes = tl.load(code_places) if IS_WHOLE else tl.load(code_places, mask=is_column[None, :], other=0.0)
            products = dot(x, tl.trans(codes), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            if NUM_GROUPS > 1 and SHARES_SCALE:
                row = tl.minimum(first_row + part * BLOCK_N, NUM_ROWS - 1)
                products *= (x_scales * tl.load(scales_ptr + row // SCALE_ROWS * NUM_GROUPS + group))[:, None]
            elif NUM_GROUPS > 1:
                scales = tl.load(scales_ptr + of_part // SCALE_ROWS * NUM_GROUPS + group)
                products *= x_scales[:, None] * scales[None, :]
            found = found + (sums[part] + products,)
        sums = found
    if IS_SPLIT:
        out_ptr += tl.program_id(1).to(tl.int64) * num_tokens * NUM_ROWS
    for part in tl.static_range(PARTS):
        of_part = rows + part * BLOCK_N
        is_row = of_part < NUM_ROWS
        total = sums[part]
        if NUM_GROUPS == 1:
            total *= tl.load(x_scale_places)[:, None]
            total *= tl.load(scales_ptr + of_part // SCALE_ROWS, mask=is_row, other=0.0)[None, :]
        if bias_ptr is not None:
            total += tl.load(bias_ptr + of_part, mask=is_row, other=0.0).to(tl.float32)[None, :]
        places = out_ptr + (tokens.to(tl.int64)[:, None] * NUM_ROWS + of_part[None, :])
        tl.store(places, cast_to(total, out_ptr.dtype.element_ty), mask=is_token[:, None] & is_row[None, :])
