"""Device code of a mixture of experts: routing, sorting of (token, expert) pairs, and the experts' products.

A pair is token * TOP_K + slot. Pairs are sorted by expert into tiles of BLOCK_M with one expert each, without atomics: a
program per expert scans all pairs. Every row of a product is computed in a fixed order, independently of the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.activation_kernels import activated
from quire.kernels.triton.arithmetic import LOG2_E, cast_to, dot, rounded
from quire.kernels.triton.linear_kernels import add_run

_WALKED = tl.constexpr(1024)


@triton.jit
def route_rows(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    logits_stride: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    IS_RENORMALIZED: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    """Write the weights f32, rounded to DTYPE, and the experts i32 [T, TOP_K] of row program_id(0); ties: the lowest first."""
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    is_expert = experts < NUM_EXPERTS
    logits = tl.load(logits_ptr + row * logits_stride + experts, mask=is_expert, other=float("-inf")).to(tl.float32)
    shares = tl.exp2((logits - tl.max(logits, 0)) * LOG2_E)
    total = tl.sum(shares, 0)
    # A maximum over NaN may have an invalid index, whose weights would be read: NaN is kept in the total only.
    left = tl.where(is_expert, tl.where(shares == shares, shares, 0.0), -1.0)
    if IS_RENORMALIZED:
        rest = left
        total = total * 0.0
        for _ in tl.static_range(TOP_K):
            share, place = tl.max(rest, 0, return_indices=True, return_indices_tie_break_left=True)
            total += share
            rest = tl.where(experts == place, -1.0, rest)
    for slot in tl.static_range(TOP_K):
        share, place = tl.max(left, 0, return_indices=True, return_indices_tie_break_left=True)
        left = tl.where(experts == place, -1.0, left)
        tl.store(weights_ptr + row * TOP_K + slot, rounded(share / total, DTYPE))
        tl.store(experts_ptr + row * TOP_K + slot, place)


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs(experts_ptr: tl.tensor, counts_ptr: tl.tensor, num_pairs: tl.tensor) -> None:
    """Write the number of pairs of expert program_id(0), i32."""
    expert = tl.program_id(0)
    total = tl.zeros([_WALKED], tl.int32)
    for first in range(0, num_pairs, _WALKED):
        pairs = first + tl.arange(0, _WALKED)
        total += (tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(total, 0))


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def sort_pairs(
    experts_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    tile_experts_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_tiles: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    """Write the tiles of expert program_id(0): pairs [num_tiles, BLOCK_M] i32, padded with -1, and the expert of each tile.

    The last expert writes -1 as the expert of unused tiles.
    """
    expert = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.sum(tl.where(experts < expert, tiles, 0), 0)
    last_tile = first_tile + tl.sum(tl.where(experts == expert, tiles, 0), 0)
    for tile in range(first_tile, last_tile):
        tl.store(tile_experts_ptr + tile, expert)
    if expert == NUM_EXPERTS - 1:
        for tile in range(last_tile, num_tiles):
            tl.store(tile_experts_ptr + tile, -1)
    found = first_tile * BLOCK_M
    for first in range(0, num_pairs, _WALKED):
        pairs = first + tl.arange(0, _WALKED)
        is_own = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=-1) == expert
        places = found + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(pairs_ptr + places, pairs, mask=is_own)
        found += tl.sum(is_own.to(tl.int32), 0)
    rest = found + tl.arange(0, BLOCK_M)
    tl.store(pairs_ptr + rest, tl.full([BLOCK_M], -1, tl.int32), mask=rest < last_tile * BLOCK_M)


@triton.jit
def _product(
    x: tl.tensor, weight_ptr: tl.tensor, places: tl.tensor, mask: tl.tensor, acc: tl.tensor, IS_SWAPPED: tl.constexpr
) -> tl.tensor:
    """Return acc + x @ w^T of a tile x [M, K] and a tile of weights [N, K]; swapped: acc + w @ x^T."""
    weight = tl.load(weight_ptr + places) if mask is None else tl.load(weight_ptr + places, mask=mask, other=0.0)
    # The wide matrix instruction needs at least 64 rows, which weights have with any number of tokens.
    return dot(weight, tl.trans(x), acc) if IS_SWAPPED else dot(x, tl.trans(weight), acc)


@triton.jit
def _first_sums(
    added_ptr: tl.tensor,
    pairs: tl.tensor,
    rows: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    IS_GATED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return what the sums of a tile [pairs, rows] begin with, swapped [rows, pairs]: what adapters add, otherwise zeros.

    At the end of a product no registers would be left for it.
    """
    acc = tl.zeros([BLOCK_N if IS_SWAPPED else BLOCK_M, BLOCK_M if IS_SWAPPED else BLOCK_N], tl.float32)
    up = acc
    if added_ptr is not None:
        FACTOR: tl.constexpr = 2 if IS_GATED else 1
        pairs = pairs[None, :] if IS_SWAPPED else pairs[:, None]
        rows = rows[:, None] if IS_SWAPPED else rows[None, :]
        mask = (pairs >= 0) & (rows < NUM_ROWS)
        places = pairs.to(tl.int64) * (FACTOR * NUM_ROWS) + rows
        acc = tl.load(added_ptr + places, mask=mask, other=0.0).to(tl.float32)
        if IS_GATED:
            up = tl.load(added_ptr + NUM_ROWS + places, mask=mask, other=0.0).to(tl.float32)
    return acc, up


@triton.jit
def multiply_experts(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    added_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    out_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    tile_experts_ptr: tl.tensor,
    x_stride: tl.tensor,
    NUM_ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
) -> None:
    """Write columns program_id(0) of the products of tile program_id(1), [pairs, NUM_ROWS] in out's dtype.

    IS_GATED   x [T, NUM_COLUMNS], weight [experts, 2 * NUM_ROWS, NUM_COLUMNS], gate rows first: activation(gate) * up,
               or with a LIMIT the clamped gate of GateClamp
    otherwise  weight [experts, NUM_ROWS, NUM_COLUMNS]: activation(product) times the pair's weight, f32, where these are given
    TOP_K      pairs that share a row of x
    bias       [experts, rows of the weight], or None
    added      [pairs, rows of the weight], what LoRA adapters add to the products, or None
    pairs_ptr  None: tile i consists of pair i, and tile_experts holds the experts of the pairs
    """
    tile = tl.program_id(1)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    lanes = tl.arange(0, BLOCK_M)
    pairs = tl.where(lanes == 0, tile, -1) if pairs_ptr is None else tl.load(pairs_ptr + tile * BLOCK_M + lanes)
    is_pair = pairs >= 0
    x_rows = pairs // TOP_K
    columns = tl.arange(0, BLOCK_K)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_places = x_rows.to(tl.int64)[:, None] * x_stride + columns[None, :]
    places = rows[:, None] * NUM_COLUMNS + columns[None, :]
    FACTOR: tl.constexpr = 2 if IS_GATED else 1
    weight_ptr += expert * (FACTOR * NUM_ROWS * NUM_COLUMNS)
    acc, up = _first_sums(added_ptr, pairs, rows, BLOCK_M, BLOCK_N, NUM_ROWS, IS_SWAPPED, IS_GATED)
    for first in tl.range(0, NUM_COLUMNS, BLOCK_K):
        mask = None
        is_there = is_pair[:, None]
        if NUM_COLUMNS % BLOCK_K != 0 or NUM_ROWS % BLOCK_N != 0:
            mask = (rows < NUM_ROWS)[:, None] & (first + columns < NUM_COLUMNS)[None, :]
            is_there = is_there & (first + columns < NUM_COLUMNS)[None, :]
        x = tl.load(x_ptr + x_places + first, mask=is_there, other=0.0)
        acc = _product(x, weight_ptr + first, places, mask, acc, IS_SWAPPED)
        if IS_GATED:
            up = _product(x, weight_ptr + NUM_ROWS * NUM_COLUMNS + first, places, mask, up, IS_SWAPPED)
    if IS_SWAPPED:
        acc = tl.trans(acc)
        up = tl.trans(up)
    acc, up = _with_biases(acc, up, bias_ptr, expert, rows, NUM_ROWS, IS_GATED)
    _store_products(acc, up, shares_ptr, out_ptr, pairs, rows, NUM_ROWS, IS_GATED, ACTIVATION, LIMIT, SLOPE)


@triton.jit
def _with_biases(
    acc: tl.tensor,
    up: tl.tensor,
    bias_ptr: tl.tensor,
    expert: tl.tensor,
    rows: tl.tensor,
    NUM_ROWS: tl.constexpr,
    IS_GATED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the products [pairs, rows] with the expert's biases added, if there are any."""
    if bias_ptr is not None:
        FACTOR: tl.constexpr = 2 if IS_GATED else 1
        bias_ptr += expert * (FACTOR * NUM_ROWS) + rows
        acc += tl.load(bias_ptr, mask=rows < NUM_ROWS, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            up += tl.load(bias_ptr + NUM_ROWS, mask=rows < NUM_ROWS, other=0.0).to(tl.float32)[None, :]
    return acc, up


@triton.jit
def _store_products(
    acc: tl.tensor,
    up: tl.tensor,
    shares_ptr: tl.tensor,
    out_ptr: tl.tensor,
    pairs: tl.tensor,
    rows: tl.tensor,
    NUM_ROWS: tl.constexpr,
    IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
) -> None:
    """Write the products [pairs, rows]: IS_GATED: activation(acc) * up or a clamped gate; otherwise activation(acc) times its
    weight.

    shares None: there are no weights; ACTIVATION negative: there is no activation
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    is_pair = pairs >= 0
    out = rounded(acc, DTYPE)
    if IS_GATED and LIMIT > 0:
        up = rounded(up, DTYPE)
        # `where` instead of minimum and maximum, to propagate NaN.
        gate = tl.where(out > LIMIT, LIMIT, out)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        out = rounded(gate * tl.sigmoid(gate * SLOPE), DTYPE) * (up + 1.0)
    elif IS_GATED:
        out = rounded(activated(out, ACTIVATION), DTYPE) * rounded(up, DTYPE)
    else:
        if ACTIVATION >= 0:
            out = rounded(activated(out, ACTIVATION), DTYPE)
        if shares_ptr is not None:
            out = out * tl.load(shares_ptr + pairs, mask=is_pair, other=0.0)[:, None]
    out_places = pairs.to(tl.int64)[:, None] * NUM_ROWS + rows[None, :]
    tl.store(out_ptr + out_places, cast_to(out, DTYPE), mask=is_pair[:, None] & (rows < NUM_ROWS)[None, :])


@triton.jit
def multiply_packed_experts(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    added_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    out_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    tile_experts_ptr: tl.tensor,
    x_stride: tl.tensor,
    NUM_ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    IS_PACKED: tl.constexpr,
    BASE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
) -> None:
    """Like multiply_experts, with quantised weights (see multiply_packed); the rows of all experts are concatenated.

    SCALE_ROWS  divides the rows of an expert
    x_scales    None, or x is float8, as the codes are: the f32 view of rows of pack_rows_launch, of which x is the float8 view
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    NUM_GROUPS: tl.constexpr = (NUM_COLUMNS + GROUP - 1) // GROUP
    WIDTH: tl.constexpr = BLOCK_K // 2 if IS_PACKED else BLOCK_K
    ROW_BYTES: tl.constexpr = NUM_COLUMNS // 2 if IS_PACKED else NUM_COLUMNS
    FACTOR: tl.constexpr = 2 if IS_GATED else 1
    tile = tl.program_id(1)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    lanes = tl.arange(0, BLOCK_M)
    pairs = tl.where(lanes == 0, tile, -1) if pairs_ptr is None else tl.load(pairs_ptr + tile * BLOCK_M + lanes)
    x_rows = pairs // TOP_K
    columns = tl.arange(0, WIDTH)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < NUM_ROWS
    first_row = expert * (FACTOR * NUM_ROWS)
    x_places = x_rows.to(tl.int64)[:, None] * x_stride + columns[None, :]
    places = (first_row + rows)[:, None] * ROW_BYTES + columns[None, :]
    acc, up = _first_sums(added_ptr, pairs, rows, BLOCK_M, BLOCK_N, NUM_ROWS, True, IS_GATED)
    for step in tl.range(0, (NUM_COLUMNS + BLOCK_K - 1) // BLOCK_K):
        first = step * BLOCK_K
        is_column = first + columns < NUM_COLUMNS
        is_x = (pairs >= 0)[:, None] & is_column[None, :]
        x = tl.load(x_ptr + x_places + first, mask=is_x, other=0.0)
        high_x = x
        if IS_PACKED:
            high_x = tl.load(x_ptr + x_places + first + WIDTH, mask=is_x, other=0.0)
        is_code = is_row[:, None] & is_column[None, :]
        group = first // GROUP
        x_scales = None
        if x_scales_ptr is not None:
            scale_places = x_rows.to(tl.int64) * (x_stride // 4) + NUM_COLUMNS // 4 + group
            x_scales = tl.load(x_scales_ptr + scale_places, mask=pairs >= 0, other=0.0)
        acc = add_run(
            acc, x, high_x, codes_ptr, scales_ptr, offsets_ptr, places + step * WIDTH,
            (first_row + rows) // SCALE_ROWS * NUM_GROUPS + group, (first_row + rows) * NUM_GROUPS + group,
            is_code, is_row, IS_PACKED, BASE, DTYPE, x_scales,
        )  # fmt: skip
        if IS_GATED:
            up_rows = first_row + NUM_ROWS + rows
            up = add_run(
                up, x, high_x, codes_ptr, scales_ptr, offsets_ptr, places + NUM_ROWS * ROW_BYTES + step * WIDTH,
                up_rows // SCALE_ROWS * NUM_GROUPS + group, up_rows * NUM_GROUPS + group,
                is_code, is_row, IS_PACKED, BASE, DTYPE, x_scales,
            )  # fmt: skip
    acc, up = _with_biases(tl.trans(acc), tl.trans(up), bias_ptr, expert, rows, NUM_ROWS, IS_GATED)
    _store_products(acc, up, shares_ptr, out_ptr, pairs, rows, NUM_ROWS, IS_GATED, ACTIVATION, LIMIT, SLOPE)


@triton.jit
def sum_pairs(y_ptr: tl.tensor, out_ptr: tl.tensor, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Write block program_id(1) of the sum of the pairs of token program_id(0), in the order of the slots."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        total += tl.load(y_ptr + (token * TOP_K + slot) * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + columns, cast_to(total, out_ptr.dtype.element_ty), mask=mask)
