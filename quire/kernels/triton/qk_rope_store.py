"""Between projections and attention: norm of q and k, rotary embedding, and the store of k and v, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.model_spec import RopeSpec
from quire.kernels.reference.rope import cos_sin
from quire.kernels.triton.arithmetic import cast_to, rounded, whole
from quire.kernels.triton.attention import IS_FUSED, KvCache, check_cache
from quire.kernels.triton.launching import Launch, check_contiguous, check_tensor
from quire.kernels.triton.norm import Norm, scale_normalized
from quire.kernels.triton.rotated_codes import quantize_rotated, rotate
from quire.kernels.triton.sizes import power_of_two

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FEW_TOKENS = 64
LARGEST_OF = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class Rope(NamedTuple):
    """A rotary embedding; table [positions, dim] f32: the cosines of a position, then its sines, see `rope_table`.

    If a rope has a short variant (ModelSpec.rope_switch_len), the rows of its positions follow those of the long variant.
    """

    spec: RopeSpec
    table: Tensor


def rope_table(spec: RopeSpec, frequencies: Tensor, num_positions: int, dtype: torch.dtype) -> Rope:
    """Return the table of all positions below num_positions, rounded to dtype as kernels/reference/rope.py rounds.

    frequencies  [dim / 2] f32, from inverse_frequencies, on the device of the table
    """
    positions = torch.arange(num_positions, device=frequencies.device)
    cos, sin = cos_sin(spec, frequencies, positions, dtype)
    return Rope(spec, torch.cat((cos, sin), -1)[:, 0].float().contiguous())


class Projections(NamedTuple):
    """q [T, H, D] and k, v [T, K, D], the heads of a token contiguous in each; they may be parts of one projection."""

    q: Tensor
    k: Tensor
    v: Tensor


def place_heads(
    projected: Projections,
    cache: KvCache,
    slots: Tensor | None,
    positions: Tensor,
    rope: Rope | None,
    norms: tuple[Norm, Norm] | None = None,
    is_in_order: bool = False,
) -> Tensor:
    """Normalise q and k head by head, rotate them, write k and v into the cache, and return q.

    cache      if quantised, each (token, head) is scaled by its maximum magnitude, or rotated where codes have four bits
    slots      [T] i64, block * block_size + offset; negative: the token is padding and not stored. None: nothing is stored, and
               k and v are not read
    positions  [T] i64 or i32, rows of rope's table
    rope       None: no rotation
    norms      of q and of k, RMSNorm over head_dim; None: none
    is_in_order  batch-invariant: sums have the same order for any number of tokens
    Returns    [T, H, D] contiguous, rotated if the keys are
    """
    out = torch.empty(projected.q.shape, dtype=projected.q.dtype, device=projected.q.device)
    place_heads_launch(out, projected, cache, slots, positions, rope, norms, is_in_order).run()
    return out


def place_heads_launch(
    out: Tensor,
    projected: Projections,
    cache: KvCache,
    slots: Tensor | None,
    positions: Tensor,
    rope: Rope | None,
    norms: tuple[Norm, Norm] | None = None,
    is_in_order: bool = False,
) -> Launch:
    """Return the launch of `place_heads`, which writes `out`."""
    q, k, v = projected
    _check(out, projected, cache, slots, positions, rope, norms)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    # A decode step has too few tokens to fill the device with programs for several heads.
    block_h = 1 if num_tokens <= _FEW_TOKENS or is_in_order else min(8, power_of_two(num_kv_heads))
    spec = None if norms is None else norms[0].spec
    arguments = {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "out_ptr": out,
        "k_cache_ptr": cache.k,
        "v_cache_ptr": cache.v,
        "k_scales_ptr": cache.k_scales,
        "v_scales_ptr": cache.v_scales,
        "slots_ptr": positions if slots is None else slots,  # no program reads it then
        "positions_ptr": positions,
        "table_ptr": None if rope is None else rope.table,
        "q_weight_ptr": None if norms is None else norms[0].weight,
        "k_weight_ptr": None if norms is None else norms[1].weight,
        "q_stride": q.stride(0),
        "k_stride": k.stride(0),
        "v_stride": v.stride(0),
    }
    constants = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": cache.k.shape[2],
        "BLOCK_H": block_h,
        "BLOCK_D": power_of_two(head_dim),
        "ROPE_DIM": 0 if rope is None else rope.spec.dim,
        "IS_ROPE_F32": rope is not None and rope.spec.is_f32,
        "EPS": 0.0 if spec is None else spec.eps,
        "OFFSET": 0.0 if spec is None else float(spec.offset),
        "CASTS_LATE": spec is not None and spec.late_cast,
        "LARGEST": LARGEST_OF.get(cache.k.dtype, 0.0),
    }
    # Where keys and values are one tensor (latent attention), the groups of values would store what those of keys do.
    num_stored = 0 if slots is None else 1 if cache.v is cache.k else 2
    num_groups = triton.cdiv(num_heads, block_h) + num_stored * triton.cdiv(num_kv_heads, block_h)
    num_warps = 1 if block_h == 1 else 4
    # The same option as in fused attention, so that the stored values are the same, integers in particular.
    return Launch(_place_heads, (num_tokens, num_groups), arguments, constants, num_warps, num_stages=1, is_fused=IS_FUSED)


def _check(
    out: Tensor,
    projected: Projections,
    cache: KvCache,
    slots: Tensor | None,
    positions: Tensor,
    rope: Rope | None,
    norms: tuple[Norm, Norm] | None,
) -> None:
    q, k, _ = projected
    num_tokens, _, head_dim = q.shape
    num_kv_heads = k.shape[1]
    check_contiguous("out", out, tuple(q.shape), q.dtype)
    for name, tensor, heads in (("q", q, q.shape[1]), ("k", k, num_kv_heads), ("v", projected.v, num_kv_heads)):
        check_tensor(name, tensor, (num_tokens, heads, head_dim), q.dtype)
        if heads > 1 and tensor.stride(1) != head_dim:
            raise InvariantError(f"the heads of a token of {name} must lie in one piece, got strides {tensor.stride()}")
    check_cache(cache, num_kv_heads, head_dim, q.dtype)
    if slots is not None:
        check_contiguous("slots", slots, (num_tokens,), torch.int64)
    check_contiguous("positions", positions, (num_tokens,), torch.int64, torch.int32)
    if rope is not None:
        check_contiguous("rope table", rope.table, (None, rope.spec.dim), torch.float32)
    for norm in norms or ():
        check_contiguous("weight of q's or k's norm", norm.weight, (head_dim,), q.dtype)
        if norm.spec.kind != "rms" or norm.spec != (norms or ())[0].spec:
            raise InvariantError(f"the norms of q and k must be one RMSNorm, got {norm.spec}")


@triton.jit
def load_heads(
    ptr: tl.tensor,
    heads: tl.tensor,
    is_head: tl.tensor,
    weight_ptr: tl.tensor,
    table_ptr: tl.tensor,
    position: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    IS_ROPE_F32: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CASTS_LATE: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Return heads [N, BLOCK_D] of a token, normalised and rotated, f32 values of DTYPE."""
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    mask = is_head[:, None] & is_dim[None, :]
    # What is the same for all heads is loaded for each of them: else it would go through shared memory, with barriers. Programs
    # of more heads lack the registers.
    lanes = tl.zeros([heads.shape[0] if heads.shape[0] <= 8 else 1, 1], tl.int32)
    x = tl.load(ptr + heads[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        factor = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + EPS)[:, None]
        weight = tl.load(weight_ptr + lanes + dims[None, :], mask=is_dim[None, :], other=0.0).to(tl.float32)
        x = rounded(scale_normalized(x * factor, weight, OFFSET, CASTS_LATE, DTYPE), DTYPE)
    if table_ptr is not None:
        HALF: tl.constexpr = ROPE_DIM // 2
        # The other element of each pair is loaded again instead of being moved between threads.
        other = tl.where(dims < HALF, dims + HALF, tl.where(dims < ROPE_DIM, dims - HALF, dims))
        y = tl.load(ptr + heads[:, None] * HEAD_DIM + other[None, :], mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + lanes + other[None, :], mask=is_dim[None, :], other=0.0).to(tl.float32)
            y = rounded(scale_normalized(y * factor, weight, OFFSET, CASTS_LATE, DTYPE), DTYPE)
        angle = table_ptr + position * ROPE_DIM + (lanes + (dims % HALF)[None, :])
        is_rotated = (dims < ROPE_DIM)[None, :]
        cos = tl.load(angle, mask=is_rotated, other=1.0)
        sin = tl.load(angle + HALF, mask=is_rotated, other=0.0)
        sin = tl.where((dims < HALF)[None, :], -sin, sin)
        if IS_ROPE_F32:
            x = rounded(x * cos + y * sin, DTYPE)
        else:
            x = rounded(rounded(x * cos, DTYPE) + rounded(y * sin, DTYPE), DTYPE)
    return x


@triton.jit
def store_heads(
    x: tl.tensor,
    cache_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    rows: tl.tensor,
    is_head: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    dims = tl.arange(0, BLOCK_D)
    mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    places = cache_ptr + rows[:, None] * HEAD_DIM + dims[None, :]
    if cache_ptr.dtype.element_ty == tl.uint8:
        codes, scales = quantize_rotated(x)
        tl.store(scales_ptr + rows, scales, mask=is_head)
        packed = rows[:, None] * (HEAD_DIM // 2) + tl.arange(0, HEAD_DIM // 2)[None, :]
        tl.store(cache_ptr + packed, codes, mask=is_head[:, None])
    elif LARGEST > 0:
        # The maximum ignores NaN, which would be stored as a number, and a failed sequence would continue: its scale is NaN.
        has_nan = tl.max((x != x).to(tl.int32), 1) > 0
        size = tl.where(has_nan, float("nan"), tl.max(tl.abs(x), 1))
        tl.store(scales_ptr + rows, size * (1.0 / LARGEST), mask=is_head)
        x = tl.where(has_nan[:, None], 0.0, x * tl.where(size > 0, LARGEST / size, 0.0)[:, None])
        if cache_ptr.dtype.element_ty == tl.int8:
            tl.store(places, whole(x).to(tl.int8), mask=mask)
        else:
            tl.store(places, cast_to(x, cache_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(places, cast_to(x, cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _place_heads(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    k_scales_ptr: tl.tensor,
    v_scales_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    table_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    IS_ROPE_F32: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CASTS_LATE: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """Process heads program_id(1) of token program_id(0): those of q first, then k, then v, BLOCK_H at a time."""
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    Q_GROUPS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    KV_GROUPS: tl.constexpr = (NUM_KV_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    position = tl.load(positions_ptr + token).to(tl.int64)
    lanes = tl.arange(0, BLOCK_H)
    if group < Q_GROUPS:
        heads = group * BLOCK_H + lanes
        is_head = heads < NUM_HEADS
        x = load_heads(
            q_ptr + token * q_stride, heads, is_head, q_weight_ptr, table_ptr, position,
            HEAD_DIM, BLOCK_D, ROPE_DIM, IS_ROPE_F32, EPS, OFFSET, CASTS_LATE, DTYPE,
        )  # fmt: skip
        if k_cache_ptr.dtype.element_ty == tl.uint8:
            x = rotate(x)
        store_heads(x, out_ptr, None, token * NUM_HEADS + heads, is_head, HEAD_DIM, BLOCK_D, 0.0)
    else:
        slot = tl.load(slots_ptr + token)
        heads = (group - Q_GROUPS) % KV_GROUPS * BLOCK_H + lanes
        is_head = heads < tl.where(slot >= 0, NUM_KV_HEADS, 0)
        rows = (slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
        if group < Q_GROUPS + KV_GROUPS:
            x = load_heads(
                k_ptr + token * k_stride, heads, is_head, k_weight_ptr, table_ptr, position,
                HEAD_DIM, BLOCK_D, ROPE_DIM, IS_ROPE_F32, EPS, OFFSET, CASTS_LATE, DTYPE,
            )  # fmt: skip
            store_heads(x, k_cache_ptr, k_scales_ptr, rows, is_head, HEAD_DIM, BLOCK_D, LARGEST)
        else:
            x = load_heads(
                v_ptr + token * v_stride, heads, is_head, None, None, position,
                HEAD_DIM, BLOCK_D, ROPE_DIM, IS_ROPE_F32, EPS, OFFSET, CASTS_LATE, DTYPE,
            )  # fmt: skip
            store_heads(x, v_cache_ptr, v_scales_ptr, rows, is_head, HEAD_DIM, BLOCK_D, LARGEST)
