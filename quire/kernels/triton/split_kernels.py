"""Device code of attention split over its keys: the chunk plan is computed on the device, programs process it, then a merge.

The size of a sequence's chunks, and so its sums, depend only on its length. An item is one chunk of one tile; items of a tile
are consecutive, in the order of their keys. Programs process items until none is left: one CUDA graph serves every length.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import LOG2_E
from quire.kernels.triton.attention_kernels import attend_keys, find_run
from quire.kernels.triton.merge_kernels import merge_row

_DOUBLINGS = tl.constexpr(12)


@triton.jit
def _chunk_size(first_key: tl.tensor, end: tl.tensor, CHUNK: tl.constexpr, MOST: tl.constexpr) -> tl.tensor:
    """Return CHUNK, doubled until keys [first_key, end) lie in at most MOST chunks; MOST 0: not doubled."""
    size = end * 0 + CHUNK
    if MOST > 0:
        for _ in tl.static_range(_DOUBLINGS):
            size = tl.where(tl.cdiv(end, size) - first_key // size > MOST, size * 2, size)
    return size


@triton.jit(do_not_specialize=["num_tiles"])
def plan_chunks(
    starts_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    tile_sequences_ptr: tl.tensor,
    tile_offsets_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    num_drafts_ptr: tl.tensor,
    num_tiles: tl.tensor,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the start of the items of tile program_id(0), and its index for each of them.

    starts  [tiles + 1] i32: the first item of each tile, and the total number
    tiles   [items] i32: the tile of each item
    """
    tile = tl.program_id(0)
    start = 0
    own = 0
    for first in tl.range(0, tile + 1, BLOCK):
        tiles = first + tl.arange(0, BLOCK)
        inside = tiles <= tile
        if tile_sequences_ptr is None:
            length = tl.load(context_lens_ptr + tiles, mask=inside, other=0)
            place = length - 1
            tree_start = length
        else:
            sequences = tl.load(tile_sequences_ptr + tiles, mask=inside, other=0)
            length = tl.load(context_lens_ptr + sequences, mask=inside, other=0)
            offsets = tl.load(tile_offsets_ptr + tiles, mask=inside, other=0)
            low = tl.load(query_starts_ptr + sequences, mask=inside, other=0)
            high = tl.load(query_starts_ptr + sequences + 1, mask=inside, other=0)
            place = length - (high - low - offsets)
            tree_start = length
            if num_drafts_ptr is not None:
                tree_start = length - tl.load(num_drafts_ptr + sequences, mask=inside, other=0)
        end = tl.minimum(place + QUERIES, length)
        first_key = end * 0
        if WINDOW > 0:
            first_key = tl.maximum(tl.minimum(place, tree_start) - WINDOW + 1, 0)
        size = _chunk_size(first_key, end, CHUNK, MOST)
        counts = tl.where(inside & (end > 0), tl.cdiv(end, size) - first_key // size, 0)
        start += tl.sum(tl.where(tiles < tile, counts, 0), 0)
        own += tl.sum(tl.where(tiles == tile, counts, 0), 0)
    tl.store(starts_ptr + tile, start)
    if tile == num_tiles - 1:
        tl.store(starts_ptr + num_tiles, start + own)
    for first in tl.range(0, own, BLOCK):
        items = first + tl.arange(0, BLOCK)
        tl.store(tiles_ptr + start + items, items * 0 + tile, mask=items < own)


@triton.jit(do_not_specialize=["num_tiles"])
def attend_chunks(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scales_ptr: tl.tensor,
    v_scales_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    tile_sequences_ptr: tl.tensor,
    tile_offsets_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    num_drafts_ptr: tl.tensor,
    ancestors_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    scale: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    num_tiles: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EXTRA: tl.constexpr,
    IS_LATENT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> None:
    """Attend items program_id(0), program_id(0) + num_programs(0) and so on for head program_id(1).

    partial   [items, NUM_KV_HEADS, QUERIES * GROUP, HEAD_DIM] f32; log_sums without HEAD_DIM; the rest as for attend_runs
    chunks    [items] i32: the chunk of each item, where a rank has some of them; None: those of a tile one after the other. One
              past the end of the keys is written as a result without any key
    """
    kv_head = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    queries = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, BLOCK_D)
    CACHED_HEADS: tl.constexpr = 1 if IS_LATENT else NUM_KV_HEADS
    cached_head = kv_head * 0 if IS_LATENT else kv_head
    num_items = tl.load(starts_ptr + num_tiles)
    # Values hoisted out of this loop stay in registers, of which one-query runs then have too few, except for f32 and windows.
    STAYS: tl.constexpr = tile_sequences_ptr is None and WINDOW == 0 and tl.float32 != COMPUTE
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), disable_licm=STAYS):
        tile = tl.load(tiles_ptr + item)
        sequence, token, left, place, tree_start, first_key, end = find_run(
            tile, tile_sequences_ptr, tile_offsets_ptr, query_starts_ptr, context_lens_ptr, num_drafts_ptr, QUERIES, WINDOW
        )
        size = _chunk_size(first_key, end, CHUNK, MOST)
        chunk = first_key // size + item - tl.load(starts_ptr + tile) if chunks_ptr is None else tl.load(chunks_ptr + item)
        low = tl.maximum(first_key // BLOCK_N * BLOCK_N, chunk * size)
        high = tl.minimum(end, (chunk + 1) * size)
        is_row = (queries < QUERIES) & (queries < left)
        row_mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        q_rows = (token + queries).to(tl.int64) * q_stride + heads * (HEAD_DIM + EXTRA)
        q = tl.load(q_ptr + q_rows[:, None] + EXTRA + dims[None, :], mask=row_mask, other=0.0).to(COMPUTE)
        q_extra = None
        if EXTRA > 0:
            extra_dims = tl.arange(0, BLOCK_E)
            is_extra = is_row[:, None] & (extra_dims < EXTRA)[None, :]
            q_extra = tl.load(q_ptr + q_rows[:, None] + extra_dims[None, :], mask=is_extra, other=0.0).to(COMPUTE)
        slopes = None
        if slopes_ptr is not None:
            slopes = tl.load(slopes_ptr + heads) * LOG2_E
        table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride
        out, log_sum = attend_keys(
            q, q_extra, low, high, place + queries, is_row, place, end, tree_start, token - place, cached_head,
            k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, ancestors_ptr, positions_ptr, scale, slopes,
            HEAD_DIM, BLOCK_D, EXTRA, IS_LATENT, CACHED_HEADS, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, COMPUTE,
            MOST == 0,
        )  # fmt: skip
        parts = (item * NUM_KV_HEADS + kv_head).to(tl.int64) * (QUERIES * GROUP) + rows
        tl.store(partial_ptr + parts[:, None] * HEAD_DIM + dims[None, :], out, mask=row_mask)
        tl.store(log_sums_ptr + parts, log_sum, mask=is_row)


@triton.jit
def merge_items(
    partial_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    tile_sequences_ptr: tl.tensor,
    tile_offsets_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    num_drafts_ptr: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Merge the chunks of row program_id(1) % rows, head program_id(1) // rows, of tile program_id(0), in order; sums: see
    merge_row."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // (QUERIES * GROUP)
    row = tl.program_id(1) % (QUERIES * GROUP)
    _, token, left, _, _, _, _ = find_run(
        tile, tile_sequences_ptr, tile_offsets_ptr, query_starts_ptr, context_lens_ptr, num_drafts_ptr, QUERIES, WINDOW
    )
    query = row // GROUP
    if query >= left:
        return
    head = kv_head * GROUP + row % GROUP
    start = tl.load(starts_ptr + tile)
    used = tl.load(starts_ptr + tile + 1) - start
    ROWS: tl.constexpr = QUERIES * GROUP
    first_part = (start.to(tl.int64) * NUM_KV_HEADS + kv_head) * ROWS + row
    merge_row(
        partial_ptr, log_sums_ptr, sinks_ptr, out_ptr, sums_ptr, token + query, head, first_part, used,
        NUM_KV_HEADS * GROUP, NUM_KV_HEADS * ROWS, HEAD_DIM, BLOCK_D, BLOCK_C,
    )  # fmt: skip
