"""Device code of attention for prompts on Hopper GPUs, in Gluon: a warp that loads, and two warp groups that compute.

A program handles a tile of 128 rows as attention_kernels.py does: all query heads of one key-value head, for a run of queries
of one sequence. Two warp groups compute 64 rows each. One more warp fills tiles of keys and values in shared memory through
TMA descriptors, a few tiles ahead. Tiles are processed from the last to the first. The product with a tile's keys starts before
that of the previous tile's weights and values, so that tensor cores work while a warp group computes exponentials (Shah et al.,
FlashAttention-3, 2024).

Gluon has no interpreter; tests run this code with an emulation of what it calls (tests/unit/kernels/gpu/gluon_emulation.py).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

Shared = gl.shared_memory_descriptor

ROWS = 128
BOX = 64

_BOX = gl.constexpr(BOX)
_GROUP_ROWS = gl.constexpr(ROWS // 2)
# Versions of Triton after 3.6 have other names.
_HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
synchronise = getattr(gl, "barrier", None) or gl.thread_barrier  # waits for the other warps of the same partition
copy_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # zeros where rows are out of bounds


@gluon.jit
def _as_boxes(tiles: Shared, COUNT: gl.constexpr) -> Shared:
    """Return tiles [stages, N, D] of shared memory as the boxes [COUNT, 64, 64] of which they consist.

    A tile's first 64 columns come first, row by row, then the next ones: such is a layout with a swizzle of 128 bytes.
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if _HAS_REINTERPRET:
        boxes = tiles.reinterpret(tiles.dtype, [COUNT, _BOX, _BOX], LAYOUT)
    else:
        boxes = tiles._reinterpret(tiles.dtype, [COUNT, _BOX, _BOX], LAYOUT)
    return boxes


@gluon.jit
def _find_tiles(
    left: gl.tensor,
    context_len: gl.tensor,
    QUERIES: gl.constexpr,
    BLOCK_N: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Return for a run: index of its first query, number of tiles of keys, and how many of them are partly masked, the last.

    A sequence that is padding has one tile, too, of which no row sees a key.
    """
    place = gl.maximum(context_len - left, 0)
    end = gl.minimum(place + QUERIES, context_len)
    num_tiles = gl.maximum((end + BLOCK_N - 1) // BLOCK_N, 1)
    return place, num_tiles, num_tiles - (place + 1) // BLOCK_N


@gluon.jit
def _load_tile(
    desc: tma.tensor_descriptor,
    boxes: Shared,
    ready: Shared,
    free: Shared,
    stage: gl.tensor,
    phase: gl.tensor,
    key: gl.tensor,
    last_key: gl.tensor,
    table_ptr: gl.tensor,
    kv_head: gl.tensor,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
) -> None:
    """Fill a stage with the keys or values of [key, key + BLOCK_N) once it is free; rows past the context hold anything."""
    PARTS: gl.constexpr = BLOCK_N // _BOX
    HALVES: gl.constexpr = HEAD_DIM // _BOX
    mbarrier.wait(free.index(stage), phase ^ 1)
    mbarrier.expect(ready.index(stage), BLOCK_N * HEAD_DIM * 2)
    for part in gl.static_range(PARTS):
        place = gl.minimum(key + part * _BOX, last_key)
        block = gl.load(table_ptr + place // BLOCK_SIZE)
        row = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + place % BLOCK_SIZE // _BOX * _BOX
        for half in gl.static_range(HALVES):
            box = boxes.index((stage * HALVES + half) * PARTS + part)
            copy_box(desc, [row, half * _BOX], ready.index(stage), box)


@gluon.jit
def _load_tiles(
    k_desc: tma.tensor_descriptor,
    v_desc: tma.tensor_descriptor,
    k_tiles: Shared,
    v_tiles: Shared,
    k_ready: Shared,
    k_free: Shared,
    v_ready: Shared,
    v_free: Shared,
    table_ptr: gl.tensor,
    left: gl.tensor,
    context_len: gl.tensor,
    kv_head: gl.tensor,
    NUM_KV_HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    COUNT: gl.constexpr = STAGES * BLOCK_N * HEAD_DIM // (_BOX * _BOX)
    k_boxes = _as_boxes(k_tiles, COUNT)
    v_boxes = _as_boxes(v_tiles, COUNT)
    _, num_tiles, _ = _find_tiles(left, context_len, QUERIES, BLOCK_N)
    last_key = gl.maximum(context_len - 1, 0)
    for index in range(num_tiles):
        stage = index % STAGES
        phase = (index // STAGES) & 1
        key = (num_tiles - 1 - index) * BLOCK_N
        _load_tile(
            k_desc, k_boxes, k_ready, k_free, stage, phase, key, last_key, table_ptr, kv_head,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
        _load_tile(
            v_desc, v_boxes, v_ready, v_free, stage, phase, key, last_key, table_ptr, kv_head,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip


@gluon.jit
def _weigh(
    scores: gl.tensor,
    best: gl.tensor,
    total: gl.tensor,
    queries: gl.tensor,
    key: gl.tensor,
    scale: gl.tensor,
    IS_MASKED: gl.constexpr,
    BLOCK_N: gl.constexpr,
    S_LAYOUT: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Return the weights of a tile's scores, what earlier sums shrink by, and the new maximum and sum of weights."""
    if IS_MASKED:
        keys = key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
        scores = gl.where(keys[None, :] <= queries[:, None], scores, float("-inf"))
    new_best = gl.maximum(best, gl.max(scores, 1))
    shift = new_best * scale
    if IS_MASKED:
        # A row without any key so far keeps -inf, from which nothing can be subtracted.
        shift = gl.where(new_best == float("-inf"), 0.0, shift)
    shrink = gl.exp2(best * scale - shift)
    weights = gl.exp2(scores * scale - shift[:, None])
    total = total * shrink + gl.sum(weights, 1)
    return weights, shrink, new_best, total


@gluon.jit
def _clear_tail(
    v_tile: Shared,
    key: gl.tensor,
    context_len: gl.tensor,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
) -> None:
    """Set values past the context to zero: 0 * NaN must not reach a sum. Both warp groups write the same."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    if key + BLOCK_N > context_len:
        v = v_tile.load(LAYOUT)
        keys = key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
        v_tile.store(gl.where((keys < context_len)[:, None], v, gl.full_like(v, 0.0)))
        fence_async_shared()
        synchronise()


@gluon.jit
def _attend_tiles(
    acc: gl.tensor,
    p: gl.tensor,
    best: gl.tensor,
    total: gl.tensor,
    q_tile: Shared,
    k_tiles: Shared,
    v_tiles: Shared,
    k_ready: Shared,
    k_free: Shared,
    v_ready: Shared,
    v_free: Shared,
    start: gl.tensor,
    stop: gl.tensor,
    queries: gl.tensor,
    first: gl.tensor,
    context_len: gl.tensor,
    scale: gl.tensor,
    turns: Shared,
    IS_LAST: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr,
    P_LAYOUT: gl.constexpr,
    ME: gl.constexpr,
    TAKES_TURNS: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Process tiles [start, stop); p holds the weights of tile start - 1, whose values are not in acc yet.

    IS_LAST: rows may not see some keys of these tiles, and values of tile start - 1 may be past the context
    """
    for index in range(start, stop):
        stage = index % STAGES
        before = index - 1
        v_stage = before % STAGES
        key = first - index * BLOCK_N
        if IS_LAST:
            # Before there are scores, as it takes many registers.
            mbarrier.wait(v_ready.index(v_stage), (before // STAGES) & 1)
            _clear_tail(v_tiles.index(v_stage), key + BLOCK_N, context_len, BLOCK_N, HEAD_DIM)
        mbarrier.wait(k_ready.index(stage), (index // STAGES) & 1)
        zero = gl.zeros([_GROUP_ROWS, BLOCK_N], gl.float32, S_LAYOUT)
        if TAKES_TURNS:
            mbarrier.wait(turns.index(ME), index & 1)
        coming = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(v_stage), (before // STAGES) & 1)
        acc = warpgroup_mma(p, v_tiles.index(v_stage), acc, is_async=True)
        if TAKES_TURNS:
            mbarrier.arrive(turns.index(1 - ME))
        scores = warpgroup_mma_wait(1, deps=[coming])
        synchronise()
        mbarrier.arrive(k_free.index(stage))
        weights, shrink, best, total = _weigh(scores, best, total, queries, key, scale, IS_LAST, BLOCK_N, S_LAYOUT)
        acc = warpgroup_mma_wait(0, deps=[acc])
        synchronise()
        mbarrier.arrive(v_free.index(v_stage))
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
        p = gl.convert_layout(weights.to(p.dtype), P_LAYOUT)
    return acc, p, best, total


@gluon.jit
def _attend_rows(
    q_ptr: gl.tensor,
    q_tile: Shared,
    k_tiles: Shared,
    v_tiles: Shared,
    k_ready: Shared,
    k_free: Shared,
    v_ready: Shared,
    v_free: Shared,
    turns: Shared,
    out_ptr: gl.tensor,
    token: gl.tensor,
    left: gl.tensor,
    context_len: gl.tensor,
    kv_head: gl.tensor,
    q_stride: gl.tensor,
    scale: gl.tensor,
    ME: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    TAKES_TURNS: gl.constexpr,
) -> None:
    """Compute rows [64 * ME, 64 * ME + 64) of the tile."""
    DTYPE: gl.constexpr = q_tile.dtype
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    q_rows = _GROUP_ROWS * ME + gl.arange(0, _GROUP_ROWS, layout=gl.SliceLayout(1, Q_LAYOUT))
    # Rows beyond the last query repeat it.
    q_tokens = (token + gl.minimum(q_rows // GROUP, gl.minimum(QUERIES, left) - 1)).to(gl.int64)
    q_places = q_tokens * q_stride + (kv_head * GROUP + q_rows % GROUP) * HEAD_DIM
    q_dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, Q_LAYOUT))
    q_tile.store(gl.load(q_ptr + q_places[:, None] + q_dims[None, :]))
    fence_async_shared()
    synchronise()
    place, num_tiles, num_masked = _find_tiles(left, context_len, QUERIES, BLOCK_N)
    first = (num_tiles - 1) * BLOCK_N
    rows = _GROUP_ROWS * ME + gl.arange(0, _GROUP_ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    queries = gl.minimum(place + rows // GROUP, context_len - 1)
    best = gl.full([_GROUP_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros([_GROUP_ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([_GROUP_ROWS, HEAD_DIM], gl.float32, O_LAYOUT)
    mbarrier.wait(k_ready.index(0), 0)
    zero = gl.zeros([_GROUP_ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    if TAKES_TURNS:
        if ME == 1:
            mbarrier.arrive(turns.index(0))
        mbarrier.wait(turns.index(ME), 0)
    coming = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    if TAKES_TURNS:
        mbarrier.arrive(turns.index(1 - ME))
    scores = warpgroup_mma_wait(0, deps=[coming])
    synchronise()
    mbarrier.arrive(k_free.index(0))
    weights, _, best, total = _weigh(scores, best, total, queries, first, scale, True, BLOCK_N, S_LAYOUT)
    p = gl.convert_layout(weights.to(DTYPE), P_LAYOUT)
    # The values of the last tile of keys, which may be past the context, belong to the first of these.
    middle = gl.minimum(gl.maximum(num_masked, 2), num_tiles)
    acc, p, best, total = _attend_tiles(
        acc, p, best, total, q_tile, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, 1, middle, queries, first, context_len,
        scale, turns, True, HEAD_DIM, BLOCK_N, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT, ME, TAKES_TURNS,
    )  # fmt: skip
    acc, p, best, total = _attend_tiles(
        acc, p, best, total, q_tile, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, middle, num_tiles, queries, first,
        context_len, scale, turns, False, HEAD_DIM, BLOCK_N, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT, ME, TAKES_TURNS,
    )  # fmt: skip
    last = num_tiles - 1
    mbarrier.wait(v_ready.index(last % STAGES), (last // STAGES) & 1)
    _clear_tail(v_tiles.index(last % STAGES), first - last * BLOCK_N, context_len, BLOCK_N, HEAD_DIM)
    acc = warpgroup_mma(p, v_tiles.index(last % STAGES), acc)
    acc = acc / gl.maximum(gl.convert_layout(total, gl.SliceLayout(1, O_LAYOUT)), 1e-37)[:, None]
    o_rows = _GROUP_ROWS * ME + gl.arange(0, _GROUP_ROWS, layout=gl.SliceLayout(1, O_LAYOUT))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, O_LAYOUT))
    heads = (token + o_rows // GROUP).to(gl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + o_rows % GROUP
    is_row = (o_rows // GROUP < QUERIES) & (o_rows // GROUP < left)
    gl.store(out_ptr + heads[:, None] * HEAD_DIM + dims[None, :], acc.to(DTYPE), mask=is_row[:, None])


@gluon.jit(do_not_specialize=["num_tiles"])
def attend_prompts(
    q_ptr: gl.tensor,
    k_desc: tma.tensor_descriptor,
    v_desc: tma.tensor_descriptor,
    out_ptr: gl.tensor,
    tile_sequences_ptr: gl.tensor,
    tile_offsets_ptr: gl.tensor,
    query_starts_ptr: gl.tensor,
    context_lens_ptr: gl.tensor,
    block_tables_ptr: gl.tensor,
    scale: gl.tensor,
    q_stride: gl.tensor,
    table_stride: gl.tensor,
    num_tiles: gl.tensor,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    TAKES_TURNS: gl.constexpr,
) -> None:
    """Attend a tile for the query heads of a key-value head, over all its keys.

    q, out, the lists of tiles and `scale` are as in attention_kernels.attend_runs; k_desc and v_desc have the caches
    [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM] as matrices of rows [HEAD_DIM] in boxes of [64, 64]
    num_tiles  the programs of one head follow each other; 0: those of one tile do
    """
    program = gl.program_id(0)
    rows = gl.maximum(num_tiles, 1)
    kv_head = gl.where(num_tiles > 0, program // rows, program % NUM_KV_HEADS)
    tile = gl.where(num_tiles > 0, program % rows, program // NUM_KV_HEADS)
    sequence = gl.load(tile_sequences_ptr + tile)
    token = gl.load(query_starts_ptr + sequence) + gl.load(tile_offsets_ptr + tile)
    left = gl.load(query_starts_ptr + sequence + 1) - token
    context_len = gl.load(context_lens_ptr + sequence)
    DTYPE: gl.constexpr = k_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(DTYPE, [2, _GROUP_ROWS, HEAD_DIM], TILE)
    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, HEAD_DIM], TILE)
    v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, HEAD_DIM], TILE)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=2)
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    fence_async_shared()
    synchronise()
    table_ptr = block_tables_ptr + sequence.to(gl.int64) * table_stride
    gl.warp_specialize(
        [
            (
                _attend_rows,
                (
                    q_ptr, q_tiles.index(0), k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, turns, out_ptr, token, left,
                    context_len, kv_head, q_stride, scale, 0,
                    NUM_KV_HEADS, GROUP, QUERIES, HEAD_DIM, BLOCK_N, STAGES, TAKES_TURNS,
                ),
            ),
            (
                _attend_rows,
                (
                    q_ptr, q_tiles.index(1), k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, turns, out_ptr, token, left,
                    context_len, kv_head, q_stride, scale, 1,
                    NUM_KV_HEADS, GROUP, QUERIES, HEAD_DIM, BLOCK_N, STAGES, TAKES_TURNS,
                ),
            ),
            (
                _load_tiles,
                (
                    k_desc, v_desc, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, table_ptr, left, context_len,
                    kv_head, NUM_KV_HEADS, QUERIES, HEAD_DIM, BLOCK_SIZE, BLOCK_N, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
