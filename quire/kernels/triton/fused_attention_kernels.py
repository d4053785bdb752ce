"""Device code of a decode step's attention, starting from the projections: norm and rope of the heads, the store of k and v,
attention, and the merge of its chunks by the program that finishes last.

A program handles a key-value head of a sequence, the query heads that share it, and a chunk of the keys. Chunks depend only on
the sequence's length and are merged in order, so a row's bits do not depend on others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import cast_to
from quire.kernels.triton.attention_kernels import TINY, attend_keys
from quire.kernels.triton.pdl import launch_dependents, prefetch, wait
from quire.kernels.triton.qk_rope_store_kernels import load_heads, store_heads


@triton.jit
def _merge(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    used: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Write heads [GROUP, HEAD_DIM] at out_ptr, merged from chunks [0, used), which other programs have written.

    partial  [chunks, GROUP, HEAD_DIM] f32; log_sums [chunks, GROUP] f32
    """
    numbers = tl.arange(0, BLOCK_G * BLOCK_D)
    heads, dims = numbers // BLOCK_D, numbers % BLOCK_D
    is_number = (heads < GROUP) & (dims < HEAD_DIM)
    acc = tl.zeros([BLOCK_G * BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_G * BLOCK_D], tl.float32)
    best = tl.full([BLOCK_G * BLOCK_D], float("-inf"), tl.float32)
    for first in tl.range(0, used, BLOCK_C):
        chunks = first + tl.arange(0, BLOCK_C)
        mask = (chunks < used)[:, None] & is_number[None, :]
        rows = chunks[:, None] * GROUP + heads[None, :]
        # Bypass the L1 cache of this multiprocessor, which does not see the writes of others.
        log_sums = tl.load(log_sums_ptr + rows, mask=mask, other=float("-inf"), cache_modifier=".cg")
        partial = tl.load(partial_ptr + rows * HEAD_DIM + dims[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, tl.max(log_sums, 0))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink = tl.exp2(best - base)
        weights = tl.exp2(log_sums - base[None, :])
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(partial * weights, 0)
        best = new_best
    out = cast_to(acc / tl.maximum(total, TINY), out_ptr.dtype.element_ty)
    tl.store(out_ptr + heads * HEAD_DIM + dims, out, mask=is_number)


@triton.jit
def _prefetch_inputs(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    own_table_ptr: tl.tensor,
    kv_head: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    THREADS: tl.constexpr,
    IS_PDL: tl.constexpr,
) -> None:
    """Prefetch the blocks of keys [low, high) of a head, the norms of q and k, and the row of the rope table at table_ptr."""
    threads = tl.arange(0, THREADS)
    blocks = low // BLOCK_SIZE + threads
    is_block = blocks * BLOCK_SIZE < high
    numbers = tl.load(own_table_ptr + blocks, mask=is_block, other=0).to(tl.int64)
    places = (numbers * NUM_KV_HEADS + kv_head) * (BLOCK_SIZE * HEAD_DIM)
    BLOCK_BYTES: tl.constexpr = BLOCK_SIZE * HEAD_DIM * k_ptr.dtype.element_ty.primitive_bitwidth // 8
    prefetch(k_ptr + places, is_block, BLOCK_BYTES // 16 * 16, IS_PDL)
    prefetch(v_ptr + places, is_block, BLOCK_BYTES // 16 * 16, IS_PDL)
    if q_weight_ptr is not None:
        WEIGHT_BYTES: tl.constexpr = HEAD_DIM * q_weight_ptr.dtype.element_ty.primitive_bitwidth // 8
        prefetch(q_weight_ptr + threads * 0, threads == 0, WEIGHT_BYTES // 16 * 16, IS_PDL)
        prefetch(k_weight_ptr + threads * 0, threads == 0, WEIGHT_BYTES // 16 * 16, IS_PDL)
    if table_ptr is not None:
        prefetch(table_ptr + threads * 0, threads == 0, ROPE_DIM * 4 // 16 * 16, IS_PDL)


@triton.jit
def attend_projected(
    qkv_ptr: tl.tensor,
    out_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scales_ptr: tl.tensor,
    v_scales_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    table_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    scale: tl.tensor,
    table_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST_CHUNKS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    IS_ROPE_F32: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CASTS_LATE: tl.constexpr,
    LARGEST: tl.constexpr,
    THREADS: tl.constexpr,
    CAN_FETCH: tl.constexpr,
    IS_PDL: tl.constexpr,
) -> None:
    """Attend the new token of sequence program_id(0) with key-value head program_id(1), to chunk program_id(2) of its keys.

    qkv       [S, (NUM_KV_HEADS * GROUP + 2 * NUM_KV_HEADS) * HEAD_DIM]: heads of q, of k, of v
    out       [S, NUM_KV_HEADS * GROUP, HEAD_DIM]
    k, v, scales, scale, WINDOW, SOFTCAP  as in attention_kernels.attend_runs
    slots, positions, table, LARGEST      as in qk_rope_store
    partial   [S, NUM_KV_HEADS, MOST_CHUNKS, GROUP, HEAD_DIM] f32; log_sums without HEAD_DIM
    arrived   [S, NUM_KV_HEADS] i32, zeros before and after
    CHUNK     tokens of a chunk, a multiple of BLOCK_N; more if there would be more than MOST_CHUNKS chunks
    CAN_FETCH whether rows of caches and tables are multiples of 16 bytes
    """
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    launch_dependents(IS_PDL)
    # Before the wait only what no fused launch writes: the inputs of the step, and what earlier steps have cached.
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    chunk = tl.program_id(2)
    end = tl.load(context_lens_ptr + sequence)
    start = end * 0
    if WINDOW > 0:
        start = tl.maximum(end - WINDOW, 0) // BLOCK_N * BLOCK_N
    length = tl.cdiv(tl.cdiv(end - start, MOST_CHUNKS), BLOCK_N) * BLOCK_N
    length = tl.maximum(length, CHUNK)
    used = tl.maximum(tl.cdiv(end - start, length), 1)
    if chunk >= used:
        return
    low = start + chunk * length
    high = tl.minimum(low + length, end)

    position = tl.load(positions_ptr + sequence).to(tl.int64)
    own_table_ptr = block_tables_ptr + sequence * table_stride
    if CAN_FETCH:
        _prefetch_inputs(
            k_ptr, v_ptr, table_ptr + position * ROPE_DIM if table_ptr is not None else None, q_weight_ptr, k_weight_ptr,
            own_table_ptr, kv_head, low, high, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, ROPE_DIM, THREADS, IS_PDL,
        )  # fmt: skip
    wait(IS_PDL)
    row_ptr = qkv_ptr + sequence * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    if chunk == used - 1:
        slot = tl.load(slots_ptr + sequence)
        heads = kv_head + tl.arange(0, 1)
        is_head = heads < tl.where(slot >= 0, NUM_KV_HEADS, 0)
        rows = (slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
        k = load_heads(
            row_ptr + NUM_HEADS * HEAD_DIM, heads, is_head, k_weight_ptr, table_ptr, position,
            HEAD_DIM, BLOCK_D, ROPE_DIM, IS_ROPE_F32, EPS, OFFSET, CASTS_LATE, DTYPE,
        )  # fmt: skip
        v = load_heads(
            row_ptr + (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM, heads, is_head, None, None, position,
            HEAD_DIM, BLOCK_D, ROPE_DIM, IS_ROPE_F32, EPS, OFFSET, CASTS_LATE, DTYPE,
        )  # fmt: skip
        store_heads(k, k_ptr, k_scales_ptr, rows, is_head, HEAD_DIM, BLOCK_D, LARGEST)
        store_heads(v, v_ptr, v_scales_ptr, rows, is_head, HEAD_DIM, BLOCK_D, LARGEST)
        tl.debug_barrier()  # all threads of this program read what some of them have stored

    lanes = tl.arange(0, BLOCK_M)
    is_row = lanes < GROUP
    q = load_heads(
        row_ptr, kv_head * GROUP + lanes, is_row, q_weight_ptr, table_ptr, position,
        HEAD_DIM, BLOCK_D, ROPE_DIM, IS_ROPE_F32, EPS, OFFSET, CASTS_LATE, DTYPE,
    )  # fmt: skip
    q = cast_to(q, COMPUTE)
    out, log_sums = attend_keys(
        q, None, low, high, end - 1 + lanes * 0, is_row, end - 1, end, end, kv_head, kv_head,
        k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, own_table_ptr, None, None, scale, None,
        HEAD_DIM, BLOCK_D, 0, False, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, COMPUTE,
    )  # fmt: skip

    dims = tl.arange(0, BLOCK_D)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    own_out_ptr = out_ptr + (sequence * NUM_HEADS + kv_head * GROUP) * HEAD_DIM
    if used == 1:
        places = own_out_ptr + lanes[:, None] * HEAD_DIM + dims[None, :]
        tl.store(places, cast_to(out, out_ptr.dtype.element_ty), mask=mask)
    else:
        first_part = (sequence * NUM_KV_HEADS + kv_head) * (MOST_CHUNKS * GROUP)
        own_partial_ptr, own_log_sums_ptr = partial_ptr + first_part * HEAD_DIM, log_sums_ptr + first_part
        parts = chunk * GROUP + lanes
        tl.store(own_partial_ptr + parts[:, None] * HEAD_DIM + dims[None, :], out, mask=mask)
        tl.store(own_log_sums_ptr + parts, log_sums, mask=is_row)
        tl.debug_barrier()  # before one thread says so, all have stored
        own_arrived_ptr = arrived_ptr + sequence * NUM_KV_HEADS + kv_head
        if tl.atomic_add(own_arrived_ptr, 1, sem="acq_rel", scope="gpu") == used - 1:
            _merge(own_out_ptr, own_partial_ptr, own_log_sums_ptr, used, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, BLOCK_C)
            tl.store(own_arrived_ptr, 0)
