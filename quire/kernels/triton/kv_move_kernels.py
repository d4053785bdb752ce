"""Kernel of kv_move.py: keys and values of accepted drafts are moved within the cache."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _row_of(slot: tl.tensor, kv_head: tl.tensor, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr) -> tl.tensor:
    return (slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE


@triton.jit
def _move_rows(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scales_ptr: tl.tensor,
    v_scales_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Move the rows of key-value head program_id(1) for the moves of sequence program_id(0)."""
    run = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    for move in tl.range(tl.load(starts_ptr + run), tl.load(starts_ptr + run + 1)):
        source = _row_of(tl.load(sources_ptr + move), kv_head, NUM_KV_HEADS, BLOCK_SIZE)
        target = _row_of(tl.load(targets_ptr + move), kv_head, NUM_KV_HEADS, BLOCK_SIZE)
        k = tl.load(k_ptr + source * K_WIDTH + dims, mask=dims < K_WIDTH)
        v = tl.load(v_ptr + source * V_WIDTH + dims, mask=dims < V_WIDTH)
        tl.store(k_ptr + target * K_WIDTH + dims, k, mask=dims < K_WIDTH)
        tl.store(v_ptr + target * V_WIDTH + dims, v, mask=dims < V_WIDTH)
        if k_scales_ptr is not None:
            tl.store(k_scales_ptr + target, tl.load(k_scales_ptr + source))
            tl.store(v_scales_ptr + target, tl.load(v_scales_ptr + source))
        # The next move may write what another thread still reads for this one.
        tl.debug_barrier()
