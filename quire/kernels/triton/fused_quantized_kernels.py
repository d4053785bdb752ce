"""Device code of linear layers with quantised weights for few tokens: one pass over the codes, with norm and epilogue.

As in fused_linear_kernels.py, a program handles a few rows of the weight with all their columns. One token is multiplied by
ordinary arithmetic, more tokens by tensor cores, where each warp sums other runs of columns.
"""
# ruff: noqa: RUF005 - Triton concatenates tuples, and does not unpack them

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.activation_kernels import activated
from quire.kernels.triton.arithmetic import cast_to, dot, rounded, to_f32
from quire.kernels.triton.fused_linear_kernels import weight_rows
from quire.kernels.triton.nibbles import split_codes, split_operands
from quire.kernels.triton.norm_kernels import scale_normalized
from quire.kernels.triton.pdl import launch_dependents, prefetch, wait

_PIECE = tl.constexpr(16)


@triton.jit
def _norm_factors(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    num_tokens: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
) -> tl.tuple:
    """Return RMSNorm's factor for each token."""
    factors = ()
    for token in tl.static_range(TOKENS):
        squares = tl.zeros([BLOCK], tl.float32)
        for first in tl.static_range(0, NUM_COLUMNS, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            there = columns < tl.where(token < num_tokens, NUM_COLUMNS, 0)
            x = tl.load(x_ptr + token * x_stride + columns, mask=there, other=0.0).to(tl.float32)
            squares += x * x
        factors = factors + (tl.rsqrt(tl.sum(squares, 0) / NUM_COLUMNS + EPS),)
    return factors


@triton.jit
def _normalized_columns(
    x_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    x_stride: tl.tensor,
    num_tokens: tl.tensor,
    factors: tl.tuple,
    columns: tl.tensor,
    token: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    OFFSET: tl.constexpr,
    CASTS_LATE: tl.constexpr,
) -> tl.tensor:
    """Return columns of a token's inputs, normalised if there is a norm, f32."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    there = columns < tl.where(token < num_tokens, NUM_COLUMNS, 0)
    x = tl.load(x_ptr + token * x_stride + columns, mask=there, other=0.0).to(tl.float32)
    if norm_weight_ptr is not None:
        norm_weight = tl.load(norm_weight_ptr + columns, mask=columns < NUM_COLUMNS, other=0.0).to(tl.float32)
        x = rounded(scale_normalized(x * factors[token], norm_weight, OFFSET, CASTS_LATE, DTYPE), DTYPE)
    return x


@triton.jit
def _add_code_products(
    sums: tl.tuple,
    factors: tl.tuple,
    codes: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    first: tl.tensor,
    x_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    x_stride: tl.tensor,
    num_tokens: tl.tensor,
    HAS_OFFSETS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    IS_PACKED: tl.constexpr,
    BASE: tl.constexpr,
    RUN: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    OFFSET: tl.constexpr,
    CASTS_LATE: tl.constexpr,
) -> tl.tuple:
    """Return sums, [BLOCK_N, BLOCK / 16] of each token, with the products of bytes [first, first + BLOCK) of codes added."""
    PIECES: tl.constexpr = BLOCK // _PIECE
    bytes = first + tl.arange(0, BLOCK)
    columns = bytes
    if IS_PACKED:
        HALF: tl.constexpr = RUN // 2
        columns = bytes // HALF * RUN + bytes % HALF
        low, high = split_codes(codes, BASE)
    else:
        low = to_f32(codes)
    HAS_BASE: tl.constexpr = IS_PACKED and BASE is not None and BASE != 0
    found = ()
    for token in tl.static_range(TOKENS):
        x = _normalized_columns(
            x_ptr, norm_weight_ptr, x_stride, num_tokens, factors, columns, token, NUM_COLUMNS, OFFSET, CASTS_LATE
        )  # fmt: skip
        part = tl.sum(tl.reshape(low * x[None, :], [BLOCK_N, PIECES, _PIECE]), 2)
        if IS_PACKED:
            high_x = _normalized_columns(
                x_ptr, norm_weight_ptr, x_stride, num_tokens, factors, columns + HALF, token, NUM_COLUMNS, OFFSET, CASTS_LATE
            )  # fmt: skip
            part += tl.sum(tl.reshape(high * high_x[None, :], [BLOCK_N, PIECES, _PIECE]), 2)
            x += high_x
        if HAS_BASE or HAS_OFFSETS:
            total = tl.sum(tl.reshape(x, [PIECES, _PIECE]), 1)[None, :]
        if HAS_BASE:
            part += BASE * total
        part *= scales
        if HAS_OFFSETS:
            part += offsets * total
        found = found + (sums[token] + part,)
    return found


@triton.jit
def _scales_of(
    ptr: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    first: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BYTE_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return scales or offsets [rows, BLOCK / 16] of pieces of 16 bytes of codes from byte `first` on."""
    NUM_GROUPS: tl.constexpr = (NUM_COLUMNS + GROUP - 1) // GROUP
    pieces = first // _PIECE + tl.arange(0, BLOCK // _PIECE)
    groups = pieces * (_PIECE * BYTE_COLUMNS) // GROUP
    mask = is_row[:, None] & (groups < NUM_GROUPS)[None, :]
    return tl.load(ptr + (rows // SCALE_ROWS * NUM_GROUPS)[:, None] + groups[None, :], mask=mask, other=0.0)


@triton.jit
def _finish_token(
    y: tl.tensor,
    out_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    first_row: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    token: tl.tensor,
    out_stride: tl.tensor,
    num_tokens: tl.tensor,
    residual_scale: tl.tensor,
    NUM_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_SCALED: tl.constexpr,
) -> None:
    """Apply the epilogue to the sums y [BLOCK_N] of a token and write them."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = NUM_ROWS // 2 if IS_GATED else NUM_ROWS
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
    out = out_ptr + token * out_stride + outputs
    mask = outputs < tl.where(token < num_tokens, WIDTH, 0)
    if HAS_RESIDUAL:
        if IS_SCALED:
            y = rounded(y * residual_scale, DTYPE)
        y = tl.load(out, mask=mask, other=0.0).to(tl.float32) + y
    tl.store(out, cast_to(y, DTYPE), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "residual_scale"])
def fused_quantized_gemv(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    num_tokens: tl.tensor,
    residual_scale: tl.tensor,
    NUM_ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    IS_PACKED: tl.constexpr,
    BASE: tl.constexpr,
    RUN: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
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
    """Write BLOCK_N rows of the weight times every token; see fused_quantized.fused_quantized_launch.

    BLOCK          bytes of codes of a row that are processed at once
    FETCHED_BYTES  prefetched bytes of each row, after its first BLOCK bytes
    """
    launch_dependents(IS_PDL)
    BYTE_COLUMNS: tl.constexpr = 2 if IS_PACKED else 1
    ROW_BYTES: tl.constexpr = NUM_COLUMNS // BYTE_COLUMNS
    first_row = tl.program_id(0) * BLOCK_N
    lanes = tl.arange(0, BLOCK_N)
    rows = weight_rows(first_row, lanes, NUM_ROWS, IS_GATED)
    is_row = first_row + lanes < NUM_ROWS
    bytes = tl.arange(0, BLOCK)
    places = codes_ptr + rows.to(tl.int64)[:, None] * ROW_BYTES + bytes[None, :]
    codes = tl.load(places, mask=is_row[:, None] & (bytes < ROW_BYTES)[None, :], other=0.0)
    if FETCHED_BYTES > 0:
        threads = tl.arange(0, THREADS)
        fetched = weight_rows(first_row, threads, NUM_ROWS, IS_GATED)
        is_fetched = (threads < BLOCK_N) & (first_row + threads < NUM_ROWS)
        prefetch(codes_ptr + fetched.to(tl.int64) * ROW_BYTES + BLOCK, is_fetched, FETCHED_BYTES, IS_PDL)
    scales = _scales_of(scales_ptr, rows, is_row, 0, NUM_COLUMNS, GROUP, SCALE_ROWS, BYTE_COLUMNS, BLOCK)
    offsets = scales
    if offsets_ptr is not None:
        offsets = _scales_of(offsets_ptr, rows, is_row, 0, NUM_COLUMNS, GROUP, 1, BYTE_COLUMNS, BLOCK)
    wait(IS_PDL)

    factors = ()
    if norm_weight_ptr is not None:
        factors = _norm_factors(x_ptr, x_stride, num_tokens, NUM_COLUMNS, TOKENS, BLOCK, EPS)
    sums = ()
    for _ in tl.static_range(TOKENS):
        sums = sums + (tl.zeros([BLOCK_N, BLOCK // _PIECE], tl.float32),)
    sums = _add_code_products(
        sums, factors, codes, scales, offsets, 0, x_ptr, norm_weight_ptr, x_stride, num_tokens, offsets_ptr is not None,
        NUM_COLUMNS, IS_PACKED, BASE, RUN, TOKENS, BLOCK_N, BLOCK, OFFSET, CASTS_LATE,
    )  # fmt: skip
    if ROW_BYTES > BLOCK:
        for first in tl.range(BLOCK, ROW_BYTES, BLOCK, num_stages=NUM_STAGES):
            codes = tl.load(places + first, mask=is_row[:, None] & (first + bytes < ROW_BYTES)[None, :], other=0.0)
            scales = _scales_of(scales_ptr, rows, is_row, first, NUM_COLUMNS, GROUP, SCALE_ROWS, BYTE_COLUMNS, BLOCK)
            offsets = scales
            if offsets_ptr is not None:
                offsets = _scales_of(offsets_ptr, rows, is_row, first, NUM_COLUMNS, GROUP, 1, BYTE_COLUMNS, BLOCK)
            sums = _add_code_products(
                sums, factors, codes, scales, offsets, first, x_ptr, norm_weight_ptr, x_stride, num_tokens,
                offsets_ptr is not None, NUM_COLUMNS, IS_PACKED, BASE, RUN, TOKENS, BLOCK_N, BLOCK, OFFSET, CASTS_LATE,
            )  # fmt: skip
    for token in tl.static_range(TOKENS):
        _finish_token(
            tl.sum(sums[token], 1), out_ptr, bias_ptr, first_row, rows, is_row, token, out_stride, num_tokens,
            residual_scale, NUM_ROWS, BLOCK_N, KIND, IS_GATED, HAS_RESIDUAL, IS_SCALED,
        )  # fmt: skip


@triton.jit
def _factor_of_each(
    x_ptr: tl.tensor,
    x_places: tl.tensor,
    is_token: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
) -> tl.tensor:
    """Return RMSNorm's factors [TOKENS]."""
    squares = tl.zeros([TOKENS], tl.float32)
    for first in tl.range(0, NUM_COLUMNS, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = is_token[:, None] & (columns < NUM_COLUMNS)[None, :]
        x = tl.load(x_ptr + x_places[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += tl.sum(x * x, 1)
    return tl.rsqrt(squares / NUM_COLUMNS + EPS)


@triton.jit
def _input_operand(
    x_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    x_places: tl.tensor,
    columns: tl.tensor,
    is_token: tl.tensor,
    factors: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    OFFSET: tl.constexpr,
    CASTS_LATE: tl.constexpr,
) -> tl.tuple:
    """Return columns [WARPS, width] of the tokens' inputs as an operand [WARPS, TOKENS, width], and the sums [WARPS, TOKENS] of
    their squares. RMSNorm's factors [TOKENS] are applied in f16 only."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    mask = is_token[None, :, None] & (columns < NUM_COLUMNS)[:, None, :]
    x = tl.load(x_ptr + x_places[None, :, None] + columns[:, None, :], mask=mask, other=0.0)
    squares = tl.zeros([columns.shape[0], is_token.shape[0]], tl.float32)
    if norm_weight_ptr is not None:
        wide = x.to(tl.float32)
        squares = tl.sum(wide * wide, 2)
        norm_weight = tl.load(norm_weight_ptr + columns, mask=columns < NUM_COLUMNS, other=0.0).to(tl.float32)[:, None, :]
        if x_ptr.dtype.element_ty == tl.float16:
            x = cast_to(scale_normalized(wide * factors[None, :, None], norm_weight, OFFSET, CASTS_LATE, DTYPE), DTYPE)
        else:
            x = cast_to(wide * (norm_weight + OFFSET), DTYPE)
    return x, squares


@triton.jit(do_not_specialize=["num_tokens", "residual_scale"])
def fused_quantized_gemm(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    num_tokens: tl.tensor,
    residual_scale: tl.tensor,
    NUM_ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    IS_PACKED: tl.constexpr,
    BASE: tl.constexpr,
    RUN: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
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
    """As fused_quantized_gemv, with tensor cores: warp w sums runs w, w + WARPS, ... of columns; the sums are added at the end.

    RMSNorm's factor multiplies the sum, so that inputs are read once; in f16, whose range is small, it multiplies the inputs.
    """
    launch_dependents(IS_PDL)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    BYTE_COLUMNS: tl.constexpr = 2 if IS_PACKED else 1
    ROW_BYTES: tl.constexpr = NUM_COLUMNS // BYTE_COLUMNS
    WIDTH: tl.constexpr = RUN // BYTE_COLUMNS
    NUM_GROUPS: tl.constexpr = (NUM_COLUMNS + GROUP - 1) // GROUP
    first_row = tl.program_id(0) * BLOCK_N
    lanes = tl.arange(0, BLOCK_N)
    rows = weight_rows(first_row, lanes, NUM_ROWS, IS_GATED)
    is_row = first_row + lanes < NUM_ROWS
    if FETCHED_BYTES > 0:
        threads = tl.arange(0, THREADS)
        fetched = weight_rows(first_row, threads, NUM_ROWS, IS_GATED)
        is_fetched = (threads < BLOCK_N) & (first_row + threads < NUM_ROWS)
        prefetch(codes_ptr + fetched.to(tl.int64) * ROW_BYTES, is_fetched, FETCHED_BYTES, IS_PDL)
    wait(IS_PDL)

    warps = tl.arange(0, WARPS)
    inner = tl.arange(0, WIDTH)
    tokens = tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    x_places = tokens.to(tl.int64) * x_stride
    row_places = rows.to(tl.int64) * ROW_BYTES
    scale_places = rows // SCALE_ROWS * NUM_GROUPS
    offset_places = rows * NUM_GROUPS
    factors = tl.zeros([TOKENS], tl.float32)
    if norm_weight_ptr is not None and x_ptr.dtype.element_ty == tl.float16:
        factors = _factor_of_each(x_ptr, x_places, is_token, NUM_COLUMNS, TOKENS, RUN, EPS)
    acc = tl.zeros([WARPS, BLOCK_N, TOKENS], tl.float32)
    squares = tl.zeros([WARPS, TOKENS], tl.float32)
    for first in tl.range(0, ROW_BYTES, WARPS * WIDTH, num_stages=NUM_STAGES):
        bytes = first + warps[:, None] * WIDTH + inner[None, :]
        columns = first * BYTE_COLUMNS + warps[:, None] * RUN + inner[None, :]
        mask = is_row[None, :, None] & (bytes < ROW_BYTES)[:, None, :]
        codes = tl.load(codes_ptr + row_places[None, :, None] + bytes[:, None, :], mask=mask, other=0.0)
        x, more = _input_operand(x_ptr, norm_weight_ptr, x_places, columns, is_token, factors, NUM_COLUMNS, OFFSET, CASTS_LATE)
        squares += more
        zeros = tl.zeros([WARPS, BLOCK_N, TOKENS], tl.float32)
        if IS_PACKED:
            high_x, more = _input_operand(
                x_ptr, norm_weight_ptr, x_places, columns + WIDTH, is_token, factors, NUM_COLUMNS, OFFSET, CASTS_LATE
            )  # fmt: skip
            squares += more
            low, high = split_operands(codes, BASE, DTYPE)
            part = dot(low, tl.permute(x, (0, 2, 1)), zeros)
            part = dot(high, tl.permute(high_x, (0, 2, 1)), part)
        else:
            part = dot(cast_to(to_f32(codes), DTYPE), tl.permute(x, (0, 2, 1)), zeros)
        groups = (first * BYTE_COLUMNS + warps * RUN) // GROUP
        is_group = (groups < NUM_GROUPS)[:, None] & is_row[None, :]
        scales = tl.load(scales_ptr + scale_places[None, :] + groups[:, None], mask=is_group, other=0.0)
        acc += part * scales[:, :, None]
        if offsets_ptr is not None:
            ones = cast_to(tl.full(codes.shape, 1.0, tl.float32), DTYPE)
            total = dot(ones, tl.permute(x, (0, 2, 1)), zeros)
            if IS_PACKED:
                total = dot(ones, tl.permute(high_x, (0, 2, 1)), total)
            offsets = tl.load(offsets_ptr + offset_places[None, :] + groups[:, None], mask=is_group, other=0.0)
            acc += total * offsets[:, :, None]

    y = tl.sum(acc, 0)
    if norm_weight_ptr is not None and x_ptr.dtype.element_ty != tl.float16:
        y *= tl.rsqrt(tl.sum(squares, 0) / NUM_COLUMNS + EPS)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    y = rounded(tl.trans(y), DTYPE)
    OUT_WIDTH: tl.constexpr = NUM_ROWS // 2 if IS_GATED else NUM_ROWS
    if IS_GATED:
        gate, up = tl.split(tl.reshape(y, [TOKENS, BLOCK_N // 2, 2]))
        y = rounded(activated(gate, KIND), DTYPE) * up
        outputs = first_row // 2 + tl.arange(0, BLOCK_N // 2)
    else:
        if KIND >= 0:
            y = activated(y, KIND)
        outputs = rows
    out = out_ptr + tokens[:, None] * out_stride + outputs[None, :]
    mask = is_token[:, None] & (outputs < OUT_WIDTH)[None, :]
    if HAS_RESIDUAL:
        if IS_SCALED:
            y = rounded(y * residual_scale, DTYPE)
        y = tl.load(out, mask=mask, other=0.0).to(tl.float32) + y
    tl.store(out, cast_to(y, DTYPE), mask=mask)
