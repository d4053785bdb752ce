"""Device code of LoRA adapters: the low-rank products of rows that have an adapter.

Rows are sorted by adapter into tiles of one adapter each, by the kernels for pairs of experts. Pairs of a mixture are sorted by
adapter and expert; "adapter" below then means both. A row's sums have one order, whatever else is in the step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import cast_to, dot, rounded


@triton.jit(do_not_specialize=["num_pairs"])
def number_pairs(
    adapters_ptr: tl.tensor,
    has_experts_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    num_pairs: tl.tensor,
    NUM_SLOTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write adapter * NUM_EXPERTS + expert of each pair, i32; -1 where there is no adapter, or one without experts."""
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair = pairs < num_pairs
    adapters = tl.load(adapters_ptr + pairs // NUM_SLOTS, mask=is_pair, other=-1)
    has_experts = tl.load(has_experts_ptr + adapters, mask=adapters >= 0, other=0)
    experts = tl.load(experts_ptr + pairs, mask=is_pair, other=-1)
    groups = tl.where((has_experts > 0) & (experts >= 0), adapters * NUM_EXPERTS + experts, -1)
    tl.store(groups_ptr + pairs, groups, mask=is_pair)


@triton.jit
def _tile_rows(rows_ptr: tl.tensor, tile: tl.tensor, BLOCK_M: tl.constexpr) -> tl.tensor:
    """Return the rows of a tile [BLOCK_M], -1 for none; rows_ptr None: tile i is row i."""
    lanes = tl.arange(0, BLOCK_M)
    return tl.where(lanes == 0, tile, -1) if rows_ptr is None else tl.load(rows_ptr + tile * BLOCK_M + lanes)


@triton.jit
def shrink_rows(
    x_ptr: tl.tensor,
    a_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    tile_adapters_ptr: tl.tensor,
    x_stride: tl.tensor,
    NUM_OUTPUTS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Write outputs program_id(1) of a x of the rows of tile program_id(0): out [T, NUM_OUTPUTS] in its dtype.

    x [T / NUM_SLOTS, NUM_COLUMNS], of which NUM_SLOTS rows share each; a [adapters, NUM_OUTPUTS, NUM_COLUMNS]
    """
    tile = tl.program_id(0)
    adapter = tl.load(tile_adapters_ptr + tile).to(tl.int64)
    if adapter < 0:
        return
    rows = _tile_rows(rows_ptr, tile, BLOCK_M)
    is_row = rows >= 0
    columns = tl.arange(0, BLOCK_K)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < NUM_OUTPUTS
    a_ptr += adapter * (NUM_OUTPUTS * NUM_COLUMNS)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(0, NUM_COLUMNS, BLOCK_K):
        is_column = first + columns < NUM_COLUMNS
        x_places = (rows // NUM_SLOTS).to(tl.int64)[:, None] * x_stride + (first + columns)[None, :]
        x = tl.load(x_ptr + x_places, mask=is_row[:, None] & is_column[None, :], other=0.0)
        a_places = outputs[:, None] * NUM_COLUMNS + (first + columns)[None, :]
        a = tl.load(a_ptr + a_places, mask=is_output[:, None] & is_column[None, :], other=0.0)
        acc = dot(x, tl.trans(a), acc)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    places = rows.to(tl.int64)[:, None] * NUM_OUTPUTS + outputs[None, :]
    tl.store(out_ptr + places, cast_to(acc, DTYPE), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def expand_rows(
    x_ptr: tl.tensor,
    b_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    tile_adapters_ptr: tl.tensor,
    x_stride: tl.tensor,
    y_stride: tl.tensor,
    adapter_stride: tl.tensor,
    NUM_OUTPUTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """Add outputs program_id(1) of b x of the rows of tile program_id(0) to y [T, NUM_OUTPUTS]; both are rounded to y's dtype.

    x [T, RANK]; b [adapters, NUM_OUTPUTS, RANK], adapters adapter_stride apart
    """
    tile = tl.program_id(0)
    adapter = tl.load(tile_adapters_ptr + tile).to(tl.int64)
    if adapter < 0:
        return
    rows = _tile_rows(rows_ptr, tile, BLOCK_M)
    is_row = rows >= 0
    ranks = tl.arange(0, BLOCK_R)
    is_rank = ranks < RANK
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < NUM_OUTPUTS
    x_places = rows.to(tl.int64)[:, None] * x_stride + ranks[None, :]
    x = tl.load(x_ptr + x_places, mask=is_row[:, None] & is_rank[None, :], other=0.0)
    b_places = adapter * adapter_stride + outputs[:, None] * RANK + ranks[None, :]
    b = tl.load(b_ptr + b_places, mask=is_output[:, None] & is_rank[None, :], other=0.0)
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    added = rounded(dot(x, tl.trans(b), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)), DTYPE)
    places = rows.to(tl.int64)[:, None] * y_stride + outputs[None, :]
    mask = is_row[:, None] & is_output[None, :]
    y = tl.load(y_ptr + places, mask=mask, other=0.0).to(tl.float32) + added
    tl.store(y_ptr + places, cast_to(y, DTYPE), mask=mask)
