"""Device code of linear layers whose weights are narrow: integers of 4 or 8 bits, or float8, with scales."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import dot, narrow


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_narrow(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    num_tokens: tl.tensor,
    NUM_ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    IS_PACKED: tl.constexpr,
    BASE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """Write rows program_id(0) of the weight times tokens program_id(1): x @ weight^T (+ bias), [T, NUM_ROWS] in out's dtype.

    Weight (n, k) is scales[n // SCALE_ROWS, k // GROUP] * (code + BASE) + offsets[n, k // GROUP]. It is the left operand: its
    rows fill the wide matrix instruction at any number of tokens. Codes are exact in x's dtype; scales come after the product.

    codes    [NUM_ROWS, NUM_COLUMNS] int8 or float8; IS_PACKED: [NUM_ROWS, NUM_COLUMNS / 2] u8, in each run of BLOCK_K columns
             byte j holds column j in its low and column BLOCK_K / 2 + j in its high bits
    GROUP    a multiple of BLOCK_K, or NUM_COLUMNS
    IS_SPLIT program_id(2) takes STEPS runs of columns, and out is [splits, T, NUM_ROWS] f32, without the bias
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    NUM_GROUPS: tl.constexpr = NUM_COLUMNS // GROUP
    WIDTH: tl.constexpr = BLOCK_K // 2 if IS_PACKED else BLOCK_K
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row, is_token = rows < NUM_ROWS, tokens < num_tokens
    columns = tl.arange(0, WIDTH)
    x_places = tokens.to(tl.int64)[:, None] * x_stride + columns[None, :]
    ROW_BYTES: tl.constexpr = NUM_COLUMNS // 2 if IS_PACKED else NUM_COLUMNS
    code_places = rows.to(tl.int64)[:, None] * ROW_BYTES + columns[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    first_step = tl.program_id(2) * STEPS
    for step in tl.range(first_step, first_step + STEPS):
        first = step * BLOCK_K
        is_column = first + columns < NUM_COLUMNS
        x = tl.load(x_ptr + x_places + first, mask=is_token[:, None] & is_column[None, :], other=0.0)
        mask = is_row[:, None] & is_column[None, :]
        zeros = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if IS_PACKED:
            codes = tl.load(codes_ptr + code_places + step * WIDTH, mask=mask, other=0)
            high_x = tl.load(x_ptr + x_places + first + WIDTH, mask=is_token[:, None] & is_column[None, :], other=0.0)
            low = narrow(((codes & 15).to(tl.int32) + BASE).to(tl.float32), DTYPE)
            high = narrow(((codes >> 4).to(tl.int32) + BASE).to(tl.float32), DTYPE)
            part = dot(high, tl.trans(high_x), dot(low, tl.trans(x), zeros))
        else:
            codes = tl.load(codes_ptr + code_places + first, mask=mask, other=0.0)
            part = dot(narrow(codes.to(tl.float32), DTYPE), tl.trans(x), zeros)
        group = first // GROUP
        is_there = rows < tl.where(first < NUM_COLUMNS, NUM_ROWS, 0)
        scales = tl.load(scales_ptr + rows // SCALE_ROWS * NUM_GROUPS + group, mask=is_there, other=0.0)
        acc += part * scales[:, None]
        if offsets_ptr is not None:
            total = tl.sum(x.to(tl.float32), 1)
            if IS_PACKED:
                total += tl.sum(high_x.to(tl.float32), 1)
            offsets = tl.load(offsets_ptr + rows * NUM_GROUPS + group, mask=is_there, other=0.0)
            acc += offsets[:, None] * total[None, :]
    mask = is_token[:, None] & is_row[None, :]
    out = tl.trans(acc)
    places = tokens.to(tl.int64)[:, None] * NUM_ROWS + rows[None, :]
    if IS_SPLIT:
        places += tl.program_id(2).to(tl.int64) * num_tokens * NUM_ROWS
    elif bias_ptr is not None:
        out += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + places, narrow(out, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def add_splits(
    parts_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    NUM_ROWS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write columns program_id(1) of token program_id(0): the sum of the splits in their order, and the bias."""
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < NUM_ROWS
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        total += tl.load(parts_ptr + (split * num_tokens + token) * NUM_ROWS + rows, mask=mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + rows, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * NUM_ROWS + rows, narrow(total, out_ptr.dtype.element_ty), mask=mask)
