"""Device code of linear layers with float8 weights and activations: quantisation of rows, and the product."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import cast_to, dot
from quire.kernels.triton.pdl import begin, fetch, wait

_LARGEST = tl.constexpr(448.0)
_LEAST = tl.constexpr(1e-30)


@triton.jit
def quantize_rows(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    x_stride: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    IS_PDL: tl.constexpr,
) -> None:
    """Write BLOCK_R groups of columns of token program_id(0), each scaled by its maximum magnitude.

    codes   [T, NUM_COLUMNS] float8, contiguous
    scales  [T, ceil(NUM_COLUMNS / GROUP)] f32, the scales of the codes; NaN if a value is not finite
    GROUP   at most BLOCK_C
    """
    NUM_GROUPS: tl.constexpr = (NUM_COLUMNS + GROUP - 1) // GROUP
    begin(IS_PDL)
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
    tl.store(scales_ptr + token * NUM_GROUPS + groups, size * (1.0 / _LARGEST), mask=groups < NUM_GROUPS)
    x = x * tl.where(size > _LEAST, _LARGEST / size, 0.0)[:, None]
    tl.store(codes_ptr + token * NUM_COLUMNS + columns, cast_to(x, codes_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_quantized(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    NUM_ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPED: tl.constexpr,
    STEPS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    FETCHED_BYTES: tl.constexpr,
    THREADS: tl.constexpr,
    IS_PDL: tl.constexpr,
) -> None:
    """Write a tile of x @ weight^T (+ bias), [T, NUM_ROWS]; program_id(0) counts GROUPED tiles of tokens, then those of rows.

    x, codes  [T, NUM_COLUMNS] and [NUM_ROWS, NUM_COLUMNS] float8
    x_scales  [T, ceil(NUM_COLUMNS / GROUP)] f32; scales [ceil(NUM_ROWS / SCALE_ROWS), ceil(NUM_COLUMNS / GROUP)] f32
    GROUP     a multiple of BLOCK_K, or NUM_COLUMNS

    Tensor cores accumulate float8 products in fewer bits than f32, so each BLOCK_K of them is summed separately, and these sums
    are added in f32.
    """
    begin(IS_PDL)
    NUM_GROUPS: tl.constexpr = (NUM_COLUMNS + GROUP - 1) // GROUP
    TILES_N: tl.constexpr = (NUM_ROWS + BLOCK_N - 1) // BLOCK_N
    # Programs that run at the same time share tokens and rows, which are then in the L2 cache.
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    first_m = tl.program_id(0) // (GROUPED * TILES_N) * GROUPED
    height = tl.minimum(tiles_m - first_m, GROUPED)
    place = tl.program_id(0) % (GROUPED * TILES_N)
    tokens = (first_m + place % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = place // height * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token, is_row = tokens < num_tokens, rows < NUM_ROWS
    columns = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + tokens.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :]
    code_tile = codes_ptr + rows.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :]
    x_scale_places = x_scales_ptr + tokens.to(tl.int64) * NUM_GROUPS
    scale_places = scales_ptr + rows // SCALE_ROWS * NUM_GROUPS
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    start = tl.program_id(1) * (STEPS * BLOCK_K)
    if IS_PDL:
        if FETCHED_BYTES > 0:
            threads = tl.arange(0, THREADS)
            fetched = place // height * BLOCK_N + threads
            is_fetched = (threads < BLOCK_N) & (fetched < NUM_ROWS)
            fetch(codes_ptr + fetched.to(tl.int64) * NUM_COLUMNS + start, is_fetched, FETCHED_BYTES, IS_PDL)
        wait(IS_PDL)
    # Where a tile's rows share their scales, the product of the scales has one value for each token.
    SHARES_SCALE: tl.constexpr = SCALE_ROWS % BLOCK_N == 0
    for step in tl.range(0, STEPS):
        first = start + step * BLOCK_K
        if NUM_COLUMNS % (STEPS * BLOCK_K) == 0:
            x = tl.load(x_tile + first, mask=is_token[:, None], other=0.0)
            codes = tl.load(code_tile + first, mask=is_row[:, None], other=0.0)
        else:
            is_column = first + columns < NUM_COLUMNS
            x = tl.load(x_tile + first, mask=is_token[:, None] & is_column[None, :], other=0.0)
            codes = tl.load(code_tile + first, mask=is_row[:, None] & is_column[None, :], other=0.0)
        part = dot(x, tl.trans(codes), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        if NUM_GROUPS > 1:
            group = tl.minimum(first // GROUP, NUM_GROUPS - 1)
            x_scales = tl.load(x_scale_places + group, mask=is_token, other=0.0)
            if SHARES_SCALE:
                scale = tl.load(scales_ptr + place // height * BLOCK_N // SCALE_ROWS * NUM_GROUPS + group)
                acc += part * (x_scales * scale)[:, None]
            else:
                scales = tl.load(scale_places + group, mask=is_row, other=0.0)
                acc += part * x_scales[:, None] * scales[None, :]
        else:
            acc += part
    if NUM_GROUPS == 1:
        acc *= tl.load(x_scale_places, mask=is_token, other=0.0)[:, None]
        acc *= tl.load(scale_places, mask=is_row, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[None, :]
    if IS_SPLIT:
        out_ptr += tl.program_id(1).to(tl.int64) * num_tokens * NUM_ROWS
    places = tokens.to(tl.int64)[:, None] * NUM_ROWS + rows[None, :]
    tl.store(out_ptr + places, cast_to(acc, out_ptr.dtype.element_ty), mask=is_token[:, None] & is_row[None, :])
