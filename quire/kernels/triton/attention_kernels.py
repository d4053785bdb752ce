"""Device code of paged attention: runs of queries against the cached keys of their sequence.

A program handles one key-value head and all query heads that share it, for a run of queries of one sequence: row r is query
r // GROUP, head r % GROUP. Tiles of BLOCK_N keys, and in split launches chunks of CHUNK keys have fixed positions. So a row's
sums depend on its own position and on whether its launch is split, not on the batch, the chunks of its prompt, or padding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import LOG2_E, cast_to, dot, tanh
from quire.kernels.triton.rotated_codes_kernels import unpack

TINY = tl.constexpr(1e-37)
_MOST_DRAFTS = tl.constexpr(64)  # of a tree, because the ancestors are a 64-bit mask


@triton.jit
def find_run(
    tile: tl.tensor,
    tile_sequences_ptr: tl.tensor,
    tile_offsets_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    num_drafts_ptr: tl.tensor,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return for a run: sequence, first token, queries left, index of the first query and of the tree, first key, end of
    keys."""
    if tile_sequences_ptr is None:
        sequence = tile
        token = tile
        left = 1
        context_len = tl.load(context_lens_ptr + sequence)
        place = context_len - left
        tree_start = context_len
    else:
        sequence = tl.load(tile_sequences_ptr + tile)
        start = tl.load(query_starts_ptr + sequence)
        token = start + tl.load(tile_offsets_ptr + tile)
        left = tl.load(query_starts_ptr + sequence + 1) - token
        context_len = tl.load(context_lens_ptr + sequence)
        place = tl.maximum(context_len - left, 0)  # padding has queries without a context
        tree_start = context_len
        if num_drafts_ptr is not None:
            tree_start = context_len - tl.load(num_drafts_ptr + sequence)
    end = tl.minimum(place + QUERIES, context_len)
    first_key = end * 0
    if WINDOW > 0:
        # The positions of drafts in a tree are at least tree_start.
        first_key = tl.maximum(tl.minimum(place, tree_start) - WINDOW + 1, 0)
    return sequence, token, left, place, tree_start, first_key, end


@triton.jit
def find_rows(
    table_ptr: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    kv_head: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the locations of the cached keys from `first` on, in a cache seen as rows [num_blocks * NUM_KV_HEADS *
    BLOCK_SIZE].

    The row of each key is the sum of the two results: a scalar i64, and [BLOCK_N], i32 if a tile never crosses blocks.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table_ptr + first // BLOCK_SIZE).to(tl.int64)
        base = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + first % BLOCK_SIZE
        rows = tl.arange(0, BLOCK_N)
    else:
        places = first + tl.arange(0, BLOCK_N)
        blocks = tl.load(table_ptr + places // BLOCK_SIZE, mask=places < end, other=0).to(tl.int64)
        base = (kv_head * BLOCK_SIZE).to(tl.int64)
        rows = blocks * (NUM_KV_HEADS * BLOCK_SIZE) + places % BLOCK_SIZE
    return base, rows


@triton.jit
def attention_mask(
    keys: tl.tensor,
    queries: tl.tensor,
    is_row: tl.tensor,
    end: tl.tensor,
    tree_start: tl.tensor,
    token_shift: tl.tensor,
    ancestors_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Return [M, N]: which of the keys at `keys` [N] the queries at `queries` [M] attend to; token = index + token_shift."""
    seen = (keys[None, :] <= queries[:, None]) & (keys[None, :] < end)
    if ancestors_ptr is not None:
        paths = tl.load(ancestors_ptr + token_shift + queries, mask=is_row, other=0)
        drafts = keys - tree_start
        # Indices after the last draft are masked already; clamping only keeps the shift below 64 bits.
        bits = (paths[:, None] >> tl.minimum(tl.maximum(drafts, 0), 63).to(tl.int64)[None, :]) & 1
        seen = seen & ((drafts[None, :] < 0) | (bits != 0))
    if WINDOW > 0:
        from_positions = queries
        to_positions = keys
        if positions_ptr is not None:
            from_positions = tl.load(positions_ptr + token_shift + queries, mask=is_row, other=0)
        # A wider window contains all drafts of a path, even by their indices, which are not below their positions.
        if ancestors_ptr is not None and WINDOW < _MOST_DRAFTS:
            is_draft = (keys >= tree_start) & (keys < end)
            to_positions = tl.load(positions_ptr + token_shift + keys, mask=is_draft, other=0)
            to_positions = tl.where(is_draft, to_positions, keys)
        seen = seen & (from_positions[:, None] - to_positions[None, :] < WINDOW)
    return seen


@triton.jit
def _powers_of_two(sizes: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the powers of two next below sizes, f32 >= 0, from 2 ** -100 on, 1 for 0, and 1 over each; both are exact."""
    bits = sizes.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.where(bits == 0, 127 << 23, tl.maximum(bits, 27 << 23))
    return bits.to(tl.float32, bitcast=True), ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def _attend_span(
    acc: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    q: tl.tensor,
    q_extra: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    queries: tl.tensor,
    is_row: tl.tensor,
    bottom: tl.tensor,
    end: tl.tensor,
    tree_start: tl.tensor,
    token_shift: tl.tensor,
    kv_head: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scales_ptr: tl.tensor,
    v_scales_ptr: tl.tensor,
    table_ptr: tl.tensor,
    ancestors_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    scale: tl.tensor,
    slopes: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EXTRA: tl.constexpr,
    IS_LATENT: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    COMPUTE: tl.constexpr,
    IN_ORDER: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Accumulate the keys of [low, high) in (acc, best, total), in base 2; low is a multiple of BLOCK_N.

    bottom      first key that any row of the run may see; slopes: of the rows; EXTRA, IS_LATENT: see attend_runs
    IS_MASKED   whether some rows do not attend to all of these keys; IN_ORDER: batch-invariant
    """
    dims = tl.arange(0, BLOCK_D)
    # Of codes of four bits, each byte is loaded for both of its dims.
    K_WIDTH: tl.constexpr = HEAD_DIM // 2 if k_ptr.dtype.element_ty == tl.uint8 else HEAD_DIM + EXTRA
    V_WIDTH: tl.constexpr = HEAD_DIM // 2 if v_ptr.dtype.element_ty == tl.uint8 else HEAD_DIM + EXTRA
    k_dims = dims % K_WIDTH if K_WIDTH < HEAD_DIM else dims + EXTRA
    v_dims = dims % V_WIDTH if V_WIDTH < HEAD_DIM else dims
    for first in tl.range(low, high, BLOCK_N):
        base, rows = find_rows(table_ptr, first, end, kv_head, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N)
        keys = first + tl.arange(0, BLOCK_N)
        k_tile = k_ptr + base * K_WIDTH + (rows[:, None] * K_WIDTH + k_dims[None, :])
        v_tile = v_ptr + base * V_WIDTH + (rows[:, None] * V_WIDTH + v_dims[None, :])
        # Slots past the context, and blocks before the window, may hold NaN of a failed sequence: 0 * NaN must reach no sum.
        is_key = keys < end
        if IS_MASKED and WINDOW > 0 and BLOCK_SIZE % BLOCK_N != 0:
            is_key = is_key & (keys >= bottom)
        if IS_MASKED or HEAD_DIM != BLOCK_D:
            is_there = is_key[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_tile, mask=is_there, other=0.0)
            v = k if IS_LATENT else tl.load(v_tile, mask=is_there, other=0.0)
        else:
            k = tl.load(k_tile)
            v = k if IS_LATENT else tl.load(v_tile)
        if K_WIDTH < HEAD_DIM:
            k = unpack(k, dims, HEAD_DIM)
        if V_WIDTH < HEAD_DIM:
            v = unpack(v, dims, HEAD_DIM)
        scores = tl.zeros([q.shape[0], BLOCK_N], tl.float32)
        if EXTRA > 0:
            extra_dims = tl.arange(0, q_extra.shape[1])
            is_there = is_key[:, None] & (extra_dims < EXTRA)[None, :]
            extra_tile = k_ptr + base * K_WIDTH + (rows[:, None] * K_WIDTH + extra_dims[None, :])
            extra = tl.load(extra_tile, mask=is_there, other=0.0)
            scores = dot(q_extra, tl.trans(extra.to(COMPUTE)), scores)
        scores = dot(q, tl.trans(k.to(COMPUTE)), scores) * scale
        if k_scales_ptr is not None:
            scores = scores * tl.load(k_scales_ptr + base + rows, mask=is_key, other=0.0)[None, :]
        if SOFTCAP > 0:
            scores = tanh(scores * (1.0 / SOFTCAP)) * (SOFTCAP * LOG2_E)
        if slopes is not None:
            places = keys
            if ancestors_ptr is not None:
                is_draft = (keys >= tree_start) & (keys < end)
                places = tl.where(is_draft, tl.load(positions_ptr + token_shift + keys, mask=is_draft, other=0), keys)
            # From the index of a query: its position would only shift its row.
            scores += slopes[:, None] * (places[None, :] - queries[:, None]).to(tl.float32)
        if IS_MASKED:
            seen = attention_mask(keys, queries, is_row, end, tree_start, token_shift, ancestors_ptr, positions_ptr, WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        shift = new_best
        if IS_MASKED:
            # A row without any key so far keeps -inf, from which nothing can be subtracted.
            shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink = tl.exp2(best - shift)
        weights = tl.exp2(scores - shift[:, None])
        total = total * shrink + tl.sum(weights, 1)
        best = new_best
        if v_scales_ptr is not None:
            # In units of the largest scale the weights stay within f16, however small the values are.
            scales = tl.load(v_scales_ptr + base + rows, mask=is_key, other=0.0)
            if IN_ORDER:
                # A row has the same bits whether or not the tile has keys that it does not see.
                own = tl.where(seen, scales[None, :], 0.0) if IS_MASKED else scales[None, :]
                unit, inverse = _powers_of_two(tl.max(own, 1)[:, None])
                weights = cast_to(weights * (scales[None, :] * inverse), COMPUTE)
                acc = dot(weights, v.to(COMPUTE), acc * (shrink[:, None] * inverse)) * unit
            else:
                unit = tl.maximum(tl.max(scales, 0), 1e-30)
                weights = cast_to(weights * (scales / unit)[None, :], COMPUTE)
                acc = dot(weights, v.to(COMPUTE), acc * (shrink / unit)[:, None]) * unit
        else:
            acc = dot(cast_to(weights, COMPUTE), v.to(COMPUTE), acc * shrink[:, None])
    return acc, best, total


@triton.jit
def attend_keys(
    q: tl.tensor,
    q_extra: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    queries: tl.tensor,
    is_row: tl.tensor,
    place: tl.tensor,
    end: tl.tensor,
    tree_start: tl.tensor,
    token_shift: tl.tensor,
    kv_head: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scales_ptr: tl.tensor,
    v_scales_ptr: tl.tensor,
    table_ptr: tl.tensor,
    ancestors_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    scale: tl.tensor,
    slopes: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EXTRA: tl.constexpr,
    IS_LATENT: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    COMPUTE: tl.constexpr,
    IN_ORDER: tl.constexpr = False,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the attention outputs [M, BLOCK_D] over the keys of [low, high), and the base-2 logarithms of their sums [M]."""
    BLOCK_M: tl.constexpr = q.shape[0]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # [low, first) may lie before some rows' window, [first, middle) is attended by every row, [middle, high) is partly masked.
    first = low
    bottom = end * 0
    if WINDOW > 0:
        bottom = tl.minimum(place, tree_start) - WINDOW + 1
        first = tl.minimum(tl.maximum(tl.cdiv(end - WINDOW, BLOCK_N) * BLOCK_N, low), high)
        # With a wide window, [low, first) contains no drafts.
        acc, best, total = _attend_span(
            acc, best, total, q, q_extra, low, first, queries, is_row, bottom, end, tree_start, token_shift, kv_head,
            k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr,
            ancestors_ptr if WINDOW < _MOST_DRAFTS + BLOCK_N else None, positions_ptr, scale, slopes,
            HEAD_DIM, BLOCK_D, EXTRA, IS_LATENT, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, COMPUTE, IN_ORDER, True,
        )  # fmt: skip
    middle = tl.minimum(tl.minimum(place + 1, tree_start), high) // BLOCK_N * BLOCK_N
    middle = tl.maximum(middle, first)
    acc, best, total = _attend_span(
        acc, best, total, q, q_extra, first, middle, queries, is_row, bottom, end, tree_start, token_shift, kv_head,
        k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, ancestors_ptr, positions_ptr, scale, slopes,
        HEAD_DIM, BLOCK_D, EXTRA, IS_LATENT, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, COMPUTE, IN_ORDER, False,
    )  # fmt: skip
    acc, best, total = _attend_span(
        acc, best, total, q, q_extra, middle, high, queries, is_row, bottom, end, tree_start, token_shift, kv_head,
        k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, ancestors_ptr, positions_ptr, scale, slopes,
        HEAD_DIM, BLOCK_D, EXTRA, IS_LATENT, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, COMPUTE, IN_ORDER, True,
    )  # fmt: skip
    return acc / tl.maximum(total, TINY)[:, None], best + tl.log2(total)


@triton.jit(do_not_specialize=["num_chunks"])
def attend_runs(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scales_ptr: tl.tensor,
    v_scales_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
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
    num_chunks: tl.tensor,
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
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    COMPUTE: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
) -> None:
    """Attend tile program_id(0) for head program_id(1): all its keys into out, or those of a chunk into partial and log_sums.

    q         [T, H, D], the heads of a token contiguous, q_stride elements between tokens; out has the same shape, contiguous
    k, v      [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM], or HEAD_DIM / 2 bytes, see rotated_codes.py
    k_scales, v_scales  [num_blocks, NUM_KV_HEADS, BLOCK_SIZE] f32 or None
    partial   [tiles, NUM_KV_HEADS, num_chunks, QUERIES * GROUP, HEAD_DIM] f32; log_sums without HEAD_DIM; None: not split
    scale     of the scores, which are base-2 logarithms unless SOFTCAP > 0; CHUNK is a multiple of BLOCK_N
    WINDOW 0: none; SOFTCAP 0: none
    slopes    [H] f32 or None: a key's score loses the slope for each token between it and the query (ALiBi)
    EXTRA     keys, heads of q and rows of the cache have EXTRA + HEAD_DIM elements, values HEAD_DIM. Values that are smaller
              than keys stand first in their rows
    IS_LATENT latent attention (MLA): v is k, one row per token for all heads; a value is a row without its first EXTRA elements
    IN_CHUNKS if not split, keys are processed chunk by chunk, and merged as by merge_chunks
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence, token, left, place, tree_start, first_key, end = find_run(
        tile, tile_sequences_ptr, tile_offsets_ptr, query_starts_ptr, context_lens_ptr, num_drafts_ptr, QUERIES, WINDOW
    )
    low = first_key // BLOCK_N * BLOCK_N
    high = end
    if partial_ptr is not None:
        chunk = first_key // CHUNK + tl.program_id(2)
        low = tl.maximum(low, chunk * CHUNK)
        high = tl.minimum(end, (chunk + 1) * CHUNK)
        if low >= high:
            return

    rows = tl.arange(0, BLOCK_M)
    queries = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (queries < QUERIES) & (queries < left)
    dims = tl.arange(0, BLOCK_D)
    row_mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    # Rows beyond the last query repeat it, unless the run ends the sequence: a mask would take registers that wide heads need.
    q_rows = (token + tl.minimum(queries, tl.minimum(QUERIES, left) - 1)).to(tl.int64) * q_stride + heads * (HEAD_DIM + EXTRA)
    q = tl.load(q_ptr + q_rows[:, None] + EXTRA + dims[None, :], mask=(dims < HEAD_DIM)[None, :], other=0.0).to(COMPUTE)
    q_extra = None
    if EXTRA > 0:
        extra_dims = tl.arange(0, BLOCK_E)
        is_extra = (extra_dims < EXTRA)[None, :]
        q_extra = tl.load(q_ptr + q_rows[:, None] + extra_dims[None, :], mask=is_extra, other=0.0).to(COMPUTE)
    CACHED_HEADS: tl.constexpr = 1 if IS_LATENT else NUM_KV_HEADS
    cached_head = kv_head * 0 if IS_LATENT else kv_head
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + heads) * LOG2_E
    table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride
    if IN_CHUNKS and partial_ptr is None:
        out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        log_sum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if sinks_ptr is not None:
            log_sum = tl.load(sinks_ptr + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            total += 1.0
        for chunk in tl.range(low // CHUNK, tl.cdiv(high, CHUNK)):
            part, part_sum = attend_keys(
                q, q_extra, tl.maximum(low, chunk * CHUNK), tl.minimum(high, (chunk + 1) * CHUNK), place + queries, is_row,
                place, end, tree_start, token - place, cached_head, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr,
                ancestors_ptr, positions_ptr, scale, slopes, HEAD_DIM, BLOCK_D, EXTRA, IS_LATENT, CACHED_HEADS, BLOCK_SIZE,
                BLOCK_N, WINDOW, SOFTCAP, COMPUTE, True,
            )  # fmt: skip
            new_best = tl.maximum(log_sum, part_sum)
            base = tl.where(new_best == float("-inf"), 0.0, new_best)
            shrink = tl.exp2(log_sum - base)
            weight = tl.exp2(part_sum - base)
            total = total * shrink + weight
            out = out * shrink[:, None] + part * weight[:, None]
            log_sum = new_best
        out = out / tl.maximum(total, TINY)[:, None]
    else:
        out, log_sum = attend_keys(
            q, q_extra, low, high, place + queries, is_row, place, end, tree_start, token - place, cached_head,
            k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, ancestors_ptr, positions_ptr, scale, slopes,
            HEAD_DIM, BLOCK_D, EXTRA, IS_LATENT, CACHED_HEADS, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, COMPUTE,
        )  # fmt: skip
    if partial_ptr is not None:
        part = (tile.to(tl.int64) * NUM_KV_HEADS + kv_head) * num_chunks + tl.program_id(2)
        parts = part * (QUERIES * GROUP) + rows
        tl.store(partial_ptr + parts[:, None] * HEAD_DIM + dims[None, :], out, mask=row_mask)
        tl.store(log_sums_ptr + parts, log_sum, mask=is_row)
    else:
        if sinks_ptr is not None and not IN_CHUNKS:
            sink = tl.load(sinks_ptr + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            top = tl.maximum(log_sum, sink)
            weight = tl.exp2(log_sum - top)
            # The same formula as in merge_chunks, because whether a launch is split depends on the rest of the step.
            out = out * weight[:, None] / (tl.exp2(sink - top) + weight)[:, None]
        out_rows = (token + queries).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
        out = cast_to(out, out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_rows[:, None] * HEAD_DIM + dims[None, :], out, mask=row_mask)
