"""Between projections and attention: norm of q and k, rotary embedding, and the store of k and v, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.model_spec import RopeSpec
from quire.kernels.reference.rope import cos_sin
from quire.kernels.triton.attention import IS_FUSED, KvCache, check_cache
from quire.kernels.triton.launching import Launch, check_contiguous, check_tensor
from quire.kernels.triton.norm import Norm
from quire.kernels.triton.qk_rope_store_kernels import _place_heads
from quire.kernels.triton.sizes import ceil_divide, power_of_two

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
    if frequencies.is_meta:  # torch would import its compiler for these operations, which takes seconds
        return Rope(spec, torch.empty(num_positions, 2 * len(frequencies), device=frequencies.device))
    positions = torch.arange(num_positions, device=frequencies.device)
    cos, sin = cos_sin(spec, frequencies, positions, dtype)
    return Rope(spec, torch.cat((cos, sin), -1)[:, 0].float().contiguous())


class Projections(NamedTuple):
    """q [T, H, D] and k, v [T, K, D], the heads of a token contiguous in each; they may be parts of one projection.

    Values may be smaller than keys: the cache gets zeros after them.
    """

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
        "VALUE_DIM": v.shape[2],
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
    num_groups = ceil_divide(num_heads, block_h) + num_stored * ceil_divide(num_kv_heads, block_h)
    num_warps = 1 if block_h == 1 else 2
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
    q, k, v = projected
    num_tokens, _, head_dim = q.shape
    num_kv_heads = k.shape[1]
    check_contiguous("out", out, tuple(q.shape), q.dtype)
    sizes = (q, q.shape[1], head_dim), (k, num_kv_heads, head_dim), (v, num_kv_heads, min(v.shape[2], head_dim))
    for name, (tensor, heads, dim) in zip("qkv", sizes, strict=True):
        check_tensor(name, tensor, (num_tokens, heads, dim), q.dtype)
        if heads > 1 and tensor.stride(1) != dim:
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
