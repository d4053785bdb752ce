"""Device code of linear layers with weights of 4- or 8-bit integers or float8 with scales, and with plain weights.

A sum has the same order for any number of tokens, and whether or not programs share its splits: columns in runs, runs in
splits, and splits are added in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import cast_to, dot, to_f32
from quire.kernels.triton.nibbles import numbers_of, split_operands


@triton.jit
def add_run(
    acc: tl.tensor,
    x: tl.tensor,
    high_x: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    code_places: tl.tensor,
    scale_places: tl.tensor,
    offset_places: tl.tensor,
    is_code: tl.tensor,
    is_row: tl.tensor,
    IS_PACKED: tl.constexpr,
    BASE: tl.constexpr,
    DTYPE: tl.constexpr,
    x_scales: tl.tensor = None,
) -> tl.tensor:
    """Return acc [N, M] plus the products of a run of columns of quantised weights [N, K] and of x [M, K].

    Codes are exact in DTYPE, that of x; scales, and those of float8 x [M], are applied to the product. IS_PACKED: x has the
    first half of the run's columns, which are the low bits, and high_x the other half; otherwise high_x is not read.
    """
    zeros = tl.zeros(acc.shape, tl.float32)
    codes = tl.load(codes_ptr + code_places, mask=is_code, other=0.0)
    if IS_PACKED:
        low, high = split_operands(codes, BASE, DTYPE)
        part = dot(high, tl.trans(high_x), dot(low, tl.trans(x), zeros))
    else:
        part = dot(codes if x_scales is not None else cast_to(to_f32(codes), DTYPE), tl.trans(x), zeros)
    scales = tl.load(scales_ptr + scale_places, mask=is_row, other=0.0)[:, None]
    acc += part * (scales if x_scales is None else scales * x_scales[None, :])
    if offsets_ptr is not None:
        # The sum of x is a product with ones: threads would add it in an order that depends on the number of tokens.
        ones = cast_to(tl.full(codes.shape, 1.0, tl.float32), DTYPE)
        total = dot(ones, tl.trans(x), zeros)
        if IS_PACKED:
            total = dot(ones, tl.trans(high_x), total)
        acc += tl.load(offsets_ptr + offset_places, mask=is_row, other=0.0)[:, None] * total
    return acc


@triton.jit
def _quantized_split(
    split: tl.tensor,
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    x_places: tl.tensor,
    rows: tl.tensor,
    is_token: tl.tensor,
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
) -> tl.tensor:
    """Return the sums [BLOCK_N, BLOCK_M] of STEPS runs of columns."""
    NUM_GROUPS: tl.constexpr = (NUM_COLUMNS + GROUP - 1) // GROUP
    WIDTH: tl.constexpr = BLOCK_K // 2 if IS_PACKED else BLOCK_K
    ROW_BYTES: tl.constexpr = NUM_COLUMNS // 2 if IS_PACKED else NUM_COLUMNS
    columns = tl.arange(0, WIDTH)
    is_row = rows < NUM_ROWS
    code_places = rows.to(tl.int64)[:, None] * ROW_BYTES + columns[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(split * STEPS, split * STEPS + STEPS):
        first = step * BLOCK_K
        is_column = first + columns < NUM_COLUMNS
        is_x = is_token[:, None] & is_column[None, :]
        x = tl.load(x_ptr + x_places + first, mask=is_x, other=0.0)
        high_x = x
        if IS_PACKED:
            high_x = tl.load(x_ptr + x_places + first + WIDTH, mask=is_x, other=0.0)
        group = first // GROUP
        is_there = rows < tl.where(first < NUM_COLUMNS, NUM_ROWS, 0)
        acc = add_run(
            acc, x, high_x, codes_ptr, scales_ptr, offsets_ptr, code_places + step * WIDTH,
            rows // SCALE_ROWS * NUM_GROUPS + group, rows * NUM_GROUPS + group,
            is_row[:, None] & is_column[None, :], is_there, IS_PACKED, BASE, x_ptr.dtype.element_ty,
        )  # fmt: skip
    return acc


@triton.jit
def _store(
    sums: tl.tensor,
    out_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    num_tokens: tl.tensor,
    NUM_ROWS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """Write sums [N, M] as [M, N], with the bias, or without it if they are a split."""
    is_row = rows < NUM_ROWS
    out = tl.trans(sums)
    places = tokens.to(tl.int64)[:, None] * NUM_ROWS + rows[None, :]
    if IS_SPLIT:
        places += tl.program_id(2).to(tl.int64) * num_tokens * NUM_ROWS
    elif bias_ptr is not None:
        out += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[None, :]
    mask = (tokens < num_tokens)[:, None] & is_row[None, :]
    tl.store(out_ptr + places, cast_to(out, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_packed(
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
    NUM_SPLITS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """Write rows program_id(0) of the weight times tokens program_id(1): x @ weight^T (+ bias), [T, NUM_ROWS] in out's dtype.

    Weight (n, k) is scales[n // SCALE_ROWS, k // GROUP] * (code + BASE) + offsets[n, k // GROUP]; BASE None: codes are doubled
    4-bit floats. The weight is the left operand, so that its rows fill the matrix instruction.

    codes       [NUM_ROWS, NUM_COLUMNS] int8, float8 or u8, its bits; IS_PACKED: [NUM_ROWS, NUM_COLUMNS / 2] u8, in each run of
                BLOCK_K columns byte j holds column j in its low and column BLOCK_K / 2 + j in its high bits
    GROUP       a multiple of BLOCK_K, or at least NUM_COLUMNS
    NUM_SPLITS  parts of STEPS runs of columns, in which sums are computed
    IS_SPLIT    program_id(2) is the part, and out is [NUM_SPLITS, T, NUM_ROWS] f32, without the bias
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    WIDTH: tl.constexpr = BLOCK_K // 2 if IS_PACKED else BLOCK_K
    x_places = tokens.to(tl.int64)[:, None] * x_stride + tl.arange(0, WIDTH)[None, :]
    split = tl.program_id(2)
    acc = _quantized_split(
        split, x_ptr, codes_ptr, scales_ptr, offsets_ptr, x_places, rows, tokens < num_tokens,
        NUM_ROWS, NUM_COLUMNS, GROUP, SCALE_ROWS, IS_PACKED, BASE, BLOCK_M, BLOCK_N, BLOCK_K, STEPS,
    )  # fmt: skip
    if not IS_SPLIT:
        for later in tl.range(1, NUM_SPLITS):
            acc += _quantized_split(
                later, x_ptr, codes_ptr, scales_ptr, offsets_ptr, x_places, rows, tokens < num_tokens,
                NUM_ROWS, NUM_COLUMNS, GROUP, SCALE_ROWS, IS_PACKED, BASE, BLOCK_M, BLOCK_N, BLOCK_K, STEPS,
            )  # fmt: skip
    _store(acc, out_ptr, bias_ptr, rows, tokens, num_tokens, NUM_ROWS, IS_SPLIT)


@triton.jit
def _dense_split(
    split: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    x_places: tl.tensor,
    places: tl.tensor,
    is_token: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
) -> tl.tensor:
    """Return the sums [BLOCK_N, BLOCK_M] of STEPS runs of columns; IS_WHOLE: all runs lie within the columns."""
    columns = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(split * STEPS, split * STEPS + STEPS):
        first = step * BLOCK_K
        if IS_WHOLE:
            x = tl.load(x_ptr + x_places + first, mask=is_token[:, None], other=0.0)
            weight = tl.load(weight_ptr + places + first)
        else:
            is_column = first + columns < NUM_COLUMNS
            x = tl.load(x_ptr + x_places + first, mask=is_token[:, None] & is_column[None, :], other=0.0)
            weight = tl.load(weight_ptr + places + first, mask=is_column[None, :], other=0.0)
        acc = dot(weight, tl.trans(x), acc)
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_dense(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    num_tokens: tl.tensor,
    NUM_ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    GROUPED: tl.constexpr,
) -> None:
    """Write a tile of x @ weight^T (+ bias), [T, NUM_ROWS] in out's dtype, as multiply_packed does with its weights.

    weight   [NUM_ROWS, NUM_COLUMNS] contiguous
    GROUPED  consecutive tiles of tokens that use the same rows of the weight, which then come from the cache
    """
    NUM_ROW_TILES: tl.constexpr = (NUM_ROWS + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    num_token_tiles = (num_tokens + BLOCK_M - 1) // BLOCK_M
    first_token_tile = tile // (GROUPED * NUM_ROW_TILES) * GROUPED
    num_here = tl.minimum(num_token_tiles - first_token_tile, GROUPED)
    place = tile % (GROUPED * NUM_ROW_TILES)
    rows = place // num_here * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = (first_token_tile + place % num_here) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    x_places = tokens.to(tl.int64)[:, None] * x_stride + columns[None, :]
    # Rows beyond the last one read it again, which takes fewer registers than a mask; they are not written.
    places = tl.minimum(rows, NUM_ROWS - 1).to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :]
    is_token = tokens < num_tokens
    IS_WHOLE: tl.constexpr = NUM_COLUMNS == NUM_SPLITS * STEPS * BLOCK_K
    split = tl.program_id(2)
    acc = _dense_split(
        split, x_ptr, weight_ptr, x_places, places, is_token,
        NUM_COLUMNS, BLOCK_M, BLOCK_N, BLOCK_K, STEPS, IS_WHOLE,
    )  # fmt: skip
    if not IS_SPLIT:
        for later in tl.range(1, NUM_SPLITS):
            acc += _dense_split(
                later, x_ptr, weight_ptr, x_places, places, is_token,
                NUM_COLUMNS, BLOCK_M, BLOCK_N, BLOCK_K, STEPS, IS_WHOLE,
            )  # fmt: skip
    _store(acc, out_ptr, bias_ptr, rows, tokens, num_tokens, NUM_ROWS, IS_SPLIT)


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
    """Write columns program_id(1) of token program_id(0): the sum of the splits in order, and the bias."""
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < NUM_ROWS
    total = tl.load(parts_ptr + token * NUM_ROWS + rows, mask=mask, other=0.0)
    for split in tl.static_range(1, NUM_SPLITS):
        total += tl.load(parts_ptr + (split * num_tokens + token) * NUM_ROWS + rows, mask=mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + rows, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * NUM_ROWS + rows, cast_to(total, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dequantize_rows(
    ids_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    out_ptr: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    IS_PACKED: tl.constexpr,
    BASE: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write columns program_id(1) of row ids[program_id(0)] of a quantised weight, see multiply_packed, in out's dtype.

    ids_ptr  i64, or None: row program_id(0)
    """
    NUM_GROUPS: tl.constexpr = (NUM_COLUMNS + GROUP - 1) // GROUP
    place = tl.program_id(0).to(tl.int64)
    row = place if ids_ptr is None else tl.load(ids_ptr + place)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < NUM_COLUMNS
    if IS_PACKED:
        HALF: tl.constexpr = RUN // 2
        within = columns % RUN
        bytes = columns // RUN * HALF + within % HALF
        codes = tl.load(codes_ptr + row * (NUM_COLUMNS // 2) + bytes, mask=mask, other=0)
        values = numbers_of(tl.where(within < HALF, codes & 15, codes >> 4), BASE)
    else:
        values = to_f32(tl.load(codes_ptr + row * NUM_COLUMNS + columns, mask=mask, other=0.0))
    groups = columns // GROUP
    values = values * tl.load(scales_ptr + row // SCALE_ROWS * NUM_GROUPS + groups, mask=mask, other=0.0)
    if offsets_ptr is not None:
        values += tl.load(offsets_ptr + row * NUM_GROUPS + groups, mask=mask, other=0.0)
    tl.store(out_ptr + place * NUM_COLUMNS + columns, cast_to(values, out_ptr.dtype.element_ty), mask=mask)
