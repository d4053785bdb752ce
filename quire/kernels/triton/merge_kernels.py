"""Device code that merges the chunks of attention: a row's parts in the order of its keys, weighted by their log-sums."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import LOG2_E, cast_to
from quire.kernels.triton.attention_kernels import TINY, find_run


@triton.jit
def merge_row(
    partial_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    first_part: tl.tensor,
    used: tl.tensor,
    NUM_HEADS: tl.constexpr,
    STEP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Write a head's output for a token from `used` parts in order, STEP apart from first_part on; and to sums_ptr, if it is to
    be merged further, the base-2 logarithm of its sum [T, NUM_HEADS] f32."""
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    total = 0.0
    best = float("-inf")
    if sinks_ptr is not None:
        best = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        total = 1.0
    for first in tl.range(0, used, BLOCK_C):
        chunks = first + tl.arange(0, BLOCK_C)
        parts = first_part + chunks.to(tl.int64) * STEP
        log_sums = tl.load(log_sums_ptr + parts, mask=chunks < used, other=float("-inf"))
        mask = (chunks < used)[:, None] & (dims < HEAD_DIM)[None, :]
        partial = tl.load(partial_ptr + parts[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        new_best = tl.maximum(best, tl.max(log_sums, 0))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink = tl.exp2(best - base)
        weights = tl.exp2(log_sums - base)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(partial * weights[:, None], 0)
        best = new_best
    out = cast_to(acc / tl.maximum(total, TINY), out_ptr.dtype.element_ty)
    row = token.to(tl.int64) * NUM_HEADS + head
    tl.store(out_ptr + row * HEAD_DIM + dims, out, mask=dims < HEAD_DIM)
    if sums_ptr is not None:
        tl.store(sums_ptr + row, best + tl.log2(total))


@triton.jit(do_not_specialize=["num_chunks"])
def merge_chunks(
    partial_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tile_sequences_ptr: tl.tensor,
    tile_offsets_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    num_drafts_ptr: tl.tensor,
    num_chunks: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Merge the chunks of row program_id(1) % rows, head program_id(1) // rows, of tile program_id(0), in order."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // (QUERIES * GROUP)
    row = tl.program_id(1) % (QUERIES * GROUP)
    _, token, left, _, _, first_key, end = find_run(
        tile, tile_sequences_ptr, tile_offsets_ptr, query_starts_ptr, context_lens_ptr, num_drafts_ptr, QUERIES, WINDOW
    )
    query = row // GROUP
    if query >= left:
        return
    head = kv_head * GROUP + row % GROUP
    used = tl.cdiv(end, CHUNK) - first_key // CHUNK
    ROWS: tl.constexpr = QUERIES * GROUP
    first_part = (tile.to(tl.int64) * NUM_KV_HEADS + kv_head) * num_chunks * ROWS + row
    merge_row(
        partial_ptr, log_sums_ptr, sinks_ptr, out_ptr, None, token + query, head, first_part, used,
        NUM_KV_HEADS * GROUP, ROWS, HEAD_DIM, BLOCK_D, BLOCK_C,
    )  # fmt: skip
