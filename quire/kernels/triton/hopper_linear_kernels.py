"""Device code of products with 4-bit weights on Hopper GPUs, in Gluon: a warp that loads, and two warp groups that compute.

A program computes tiles of 128 rows of the weight times TOKENS tokens, one after the other. A warp fills stages of shared
memory through TMA descriptors with the codes and the inputs of a run of columns. Two warp groups dequantise 64 rows each, as
left operands in registers, while the products before are computed. So a code is dequantised once for up to 256 tokens, and no
dequantised weight is written to memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from quire.kernels.triton.hopper_attention_kernels import Shared, copy_box, synchronise
from quire.kernels.triton.nibbles import PAIRS_TO_F32, numbers_of

ROWS = 128
_ROWS = gl.constexpr(ROWS)
_GROUP_ROWS = gl.constexpr(ROWS // 2)


@gluon.jit
def _place_of(tile: gl.tensor, num_tokens: gl.tensor, NUM_ROWS: gl.constexpr, TOKENS: gl.constexpr) -> tuple:
    """Return the first row, the first token and the split of a tile; tiles of the same rows are next to each other."""
    TILES: gl.constexpr = (NUM_ROWS + _ROWS - 1) // _ROWS
    num_token_tiles = (num_tokens + TOKENS - 1) // TOKENS
    return tile // num_token_tiles % TILES * _ROWS, tile % num_token_tiles * TOKENS, tile // (num_token_tiles * TILES)


@gluon.jit
def _load_runs(
    x_desc: tma.tensor_descriptor,
    codes_desc: tma.tensor_descriptor,
    x_tiles: Shared,
    code_tiles: Shared,
    ready: Shared,
    free: Shared,
    num_tokens: gl.tensor,
    num_tiles: gl.tensor,
    NUM_ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    RUN: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Fill stages once they are free, with boxes of 64 rows of codes and of each half of a run's columns of x."""
    HALF: gl.constexpr = RUN // 2
    index = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, token, split = _place_of(tile, num_tokens, NUM_ROWS, TOKENS)
        for step in range(split * STEPS, split * STEPS + STEPS):
            stage = index % STAGES
            mbarrier.wait(free.index(stage), (index // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(stage), _ROWS * HALF + TOKENS * RUN * 2)
            for half in gl.static_range(2):
                place = stage * 2 + half
                # A box begins within the rows; those beyond them are not written.
                box_row = gl.minimum(row + half * _GROUP_ROWS, NUM_ROWS - 1)
                copy_box(codes_desc, [box_row, step * (HALF // 2)], ready.index(stage), code_tiles.index(place))
                copy_box(x_desc, [token, step * RUN + half * HALF], ready.index(stage), x_tiles.index(place))
            index += 1


@gluon.jit
def _split_pairs(codes: gl.tensor, BASE: gl.constexpr) -> tuple:
    """Return as nibbles.split_codes the low bits of the first and of the second byte of pairs, then the high bits of both."""
    if BASE is None:
        first, second = numbers_of(codes & 15, None), numbers_of(codes >> 8 & 15, None)
        high_first, high_second = numbers_of(codes >> 4 & 15, None), numbers_of(codes >> 12 & 15, None)
    else:
        first, second, high_first, high_second = gl.inline_asm_elementwise(
            PAIRS_TO_F32, "=r,=r,=r,=r,=r,=r,=r,=r,r", [codes], dtype=(gl.float32,) * 4, is_pure=True, pack=2
        )
    return first, second, high_first, high_second


@gluon.jit
def _multiply_rows(
    scales_ptr: gl.tensor,
    offsets_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    out_ptr: gl.tensor,
    x_tiles: Shared,
    code_tiles: Shared,
    ready: Shared,
    free: Shared,
    num_tokens: gl.tensor,
    num_tiles: gl.tensor,
    ME: gl.constexpr,
    NUM_ROWS: gl.constexpr,
    NUM_GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
    BASE: gl.constexpr,
    TOKENS: gl.constexpr,
    RUN: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Compute rows [64 * ME, 64 * ME + 64) of every tile of the program."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    index = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, token, split = _place_of(tile, num_tokens, NUM_ROWS, TOKENS)
        row += _GROUP_ROWS * ME
        scale_rows = gl.minimum(row + gl.arange(0, _GROUP_ROWS, layout=gl.SliceLayout(1, OPERAND)), NUM_ROWS - 1)
        acc = gl.zeros([_GROUP_ROWS, TOKENS], gl.float32, ACC)
        for pair in range(STEPS // 2):
            coming = warpgroup_mma_init(acc)
            before = 0
            for odd in gl.static_range(2):
                step = pair * 2 + odd
                scale_places = scale_rows * NUM_GROUPS + (split * STEPS + step) * RUN // GROUP
                scales = gl.load(scales_ptr + scale_places)
                added = gl.zeros_like(scales) if BASE is None else scales * BASE
                if offsets_ptr is not None:
                    added += gl.load(offsets_ptr + scale_places)
                stage = (index + step) % STAGES
                mbarrier.wait(ready.index(stage), (index + step) // STAGES & 1)
                # A thread's columns are adjacent pairs, whose codes are two bytes.
                codes = code_tiles.index(stage * 2 + ME).load(gl.DotOperandLayout(0, ACC, 1))
                first, second, high_first, high_second = _split_pairs(codes, BASE)
                for half in gl.static_range(2):
                    numbers = gl.join(first, second).reshape([_GROUP_ROWS, RUN // 2])
                    numbers = gl.convert_layout(numbers, OPERAND, assert_trivial=True)
                    weights = gl.fma(numbers, scales[:, None], added[:, None]).to(x_tiles.dtype)
                    x = x_tiles.index(stage * 2 + half).permute((1, 0))
                    coming = warpgroup_mma(weights, x, coming, is_async=True)
                    if odd == 1 and half == 0:
                        coming = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[coming]))
                        synchronise()
                        mbarrier.arrive(free.index(before))
                    first, second = high_first, high_second
                before = stage
            # No product goes on in the next round, whose weights are in the same registers.
            acc = warpgroup_mma_wait(0, deps=[coming])
            synchronise()
            mbarrier.arrive(free.index(before))
        index += STEPS
        rows = row + gl.arange(0, _GROUP_ROWS, layout=gl.SliceLayout(1, ACC))
        tokens = token + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, ACC))
        if bias_ptr is not None:
            acc += gl.load(bias_ptr + rows, mask=rows < NUM_ROWS, other=0.0).to(gl.float32)[:, None]
        places = (split * num_tokens + tokens.to(gl.int64))[None, :] * NUM_ROWS + rows[:, None]
        mask = (rows < NUM_ROWS)[:, None] & (tokens < num_tokens)[None, :]
        gl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["num_tokens"])
def multiply_dequantised(
    x_desc: tma.tensor_descriptor,
    codes_desc: tma.tensor_descriptor,
    scales_ptr: gl.tensor,
    offsets_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    out_ptr: gl.tensor,
    num_tokens: gl.tensor,
    NUM_ROWS: gl.constexpr,
    NUM_COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    BASE: gl.constexpr,
    TOKENS: gl.constexpr,
    RUN: gl.constexpr,
    NUM_SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Write x @ weight^T (+ bias) in out's dtype: weights are rounded to x's dtype, sums are f32.

    x_desc, codes_desc  x [T, NUM_COLUMNS] and the codes of linear_kernels.multiply_packed as pairs [NUM_ROWS, NUM_COLUMNS / 4]
                        i16, in boxes of [TOKENS, RUN / 2] and [64, RUN / 4]
    scales, offsets     [NUM_ROWS, NUM_COLUMNS / GROUP] f32
    NUM_SPLITS          parts of sums, of an even number of runs each; with several, out is [NUM_SPLITS, T, NUM_ROWS] f32
    """
    STEPS: gl.constexpr = NUM_COLUMNS // RUN // NUM_SPLITS
    NUM_ROW_TILES: gl.constexpr = (NUM_ROWS + _ROWS - 1) // _ROWS
    num_tiles = (num_tokens + TOKENS - 1) // TOKENS * (NUM_ROW_TILES * NUM_SPLITS)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    # Rows of 16 bytes are not swizzled.
    CODES: gl.constexpr = gl.NVMMASharedLayout(RUN // 2 if RUN > 32 else 0, 16, 2)
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, TOKENS, RUN // 2], gl.NVMMASharedLayout(RUN, 16, 2))
    code_tiles = gl.allocate_shared_memory(codes_desc.dtype, [STAGES * 2, _GROUP_ROWS, RUN // 4], CODES)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    synchronise()
    gl.warp_specialize(
        [
            (
                _multiply_rows,
                (
                    scales_ptr, offsets_ptr, bias_ptr, out_ptr, x_tiles, code_tiles, ready, free, num_tokens, num_tiles, 0,
                    NUM_ROWS, NUM_COLUMNS // GROUP, GROUP, BASE, TOKENS, RUN, STEPS, STAGES,
                ),
            ),
            (
                _multiply_rows,
                (
                    scales_ptr, offsets_ptr, bias_ptr, out_ptr, x_tiles, code_tiles, ready, free, num_tokens, num_tiles, 1,
                    NUM_ROWS, NUM_COLUMNS // GROUP, GROUP, BASE, TOKENS, RUN, STEPS, STAGES,
                ),
            ),
            (
                _load_runs,
                (
                    x_desc, codes_desc, x_tiles, code_tiles, ready, free, num_tokens, num_tiles,
                    NUM_ROWS, TOKENS, RUN, STEPS, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
