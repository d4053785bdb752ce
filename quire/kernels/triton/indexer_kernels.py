"""Kernel of indexer.py: scores of keys."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import dot
from quire.kernels.triton.attention_kernels import attention_mask, find_rows


@triton.jit(do_not_specialize=["first_token", "num_keys", "table_stride"])
def _score_keys(
    out_ptr: tl.tensor,
    q_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    sequences_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    num_drafts_ptr: tl.tensor,
    ancestors_ptr: tl.tensor,
    first_token: tl.tensor,
    num_keys: tl.tensor,
    table_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> None:
    """Score keys [program_id(1) * BLOCK_N, ...) for token first_token + program_id(0).

    weights  None: the scores are the products of each head, [tokens, NUM_HEADS, num_keys]
    """
    token = first_token + tl.program_id(0)
    first = tl.program_id(1) * BLOCK_N
    keys = first + tl.arange(0, BLOCK_N)
    heads = tl.arange(0, BLOCK_H)
    is_head = heads < NUM_HEADS
    if weights_ptr is None:
        out_rows = tl.program_id(0).to(tl.int64) * NUM_HEADS + heads
        out_places = out_ptr + out_rows[:, None] * num_keys + keys[None, :]
        is_column = is_head[:, None] & (keys < num_keys)[None, :]
    else:
        out_places = out_ptr + tl.program_id(0).to(tl.int64) * num_keys + keys
        is_column = keys < num_keys
    sequence = tl.load(sequences_ptr + token)
    context_len = tl.load(context_lens_ptr + sequence)
    place = context_len - (tl.load(query_starts_ptr + sequence + 1) - token)  # negative for padding
    if first > place:
        tl.store(out_places, tl.full(out_places.shape, float("-inf"), tl.float32), mask=is_column)
        return
    end = place + 1
    tree_start = context_len
    if num_drafts_ptr is not None:
        tree_start = context_len - tl.load(num_drafts_ptr + sequence)
    table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride
    base, rows = find_rows(table_ptr, first, end, place * 0, 1, BLOCK_SIZE, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    places = base * HEAD_DIM + (rows[:, None] * HEAD_DIM + dims[None, :])
    k = tl.load(keys_ptr + places, mask=(keys < end)[:, None] & is_dim[None, :], other=0.0)
    own = token.to(tl.int64) * NUM_HEADS + heads
    q = tl.load(q_ptr + own[:, None] * HEAD_DIM + dims[None, :], mask=is_head[:, None] & is_dim[None, :], other=0.0)
    products = dot(q.to(COMPUTE), tl.trans(k.to(COMPUTE)), tl.zeros([BLOCK_H, BLOCK_N], tl.float32)) * SCALE
    query = place + tl.arange(0, 1)
    seen = attention_mask(keys, query, query >= 0, end, tree_start, token - place, ancestors_ptr, None, 0)
    scores = products
    if weights_ptr is not None:
        weights = tl.load(weights_ptr + own, mask=is_head, other=0.0)
        scores = tl.sum(tl.maximum(products, 0.0) * weights[:, None], 0)
        seen = tl.sum(seen.to(tl.int32), 0) > 0  # of the only query
    tl.store(out_places, tl.where(seen, scores, float("-inf")), mask=is_column)
