"""Paged attention on the device: whole prompts, chunks after cached prefixes, draft trees and decode steps in one call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.kv_spec import can_rotate_on_gpu
from quire.contracts.model_spec import AttentionSpec
from quire.kernels.triton.arithmetic import LOG2_E
from quire.kernels.triton.attention_kernels import attend_runs
from quire.kernels.triton.hopper_attention import attend_prompts_launch
from quire.kernels.triton.launching import ELEMENT_TYPES, FLOATS, Launch, check_contiguous, check_tensor, run_all
from quire.kernels.triton.merge_kernels import merge_chunks
from quire.kernels.triton.rotated_codes import PACKED, unrotate_launch, width_of
from quire.kernels.triton.sizes import power_of_two
from quire.kernels.triton.split_kernels import attend_chunks, merge_items, plan_chunks
from quire.kernels.triton.step import ChunkPlan, DeviceAttentionMetadata, Tiles
from quire.kernels.triton.tiles import (
    CHUNK,
    LONG_CHUNK,
    ROWS_OF_DECODE,
    SPLIT_PROGRAMS,
    AttentionTile,
    decode_attention_tile,
    in_order_attention_tile,
    is_filled,
    most_chunks,
    prefill_attention_tile,
)

_QUANTISED = (torch.int8, torch.float8_e4m3fn, PACKED)
_MERGED_AT_ONCE = 16
_PLANNED_AT_ONCE = 512
_PARTIAL_BYTES = 256 << 20
"""Maximum size of the partial results of long runs, unless a few tiles need more; other tiles are computed afterwards."""
_ALIGNED_TILES = 4  # tile lists begin at a multiple of 16 bytes

IS_FUSED = False
"""Whether a multiply and an add may be fused. The compiler would do so for tiles without a mask only, so a row's bits would
depend on where its prompt was split. Not to fuse costs nothing: the scores are multiplied for their maximum anyway."""


_LATENT_GROUP = 32
"""Most query heads of latent attention that a program computes: all of them share one row per token."""


class _Heads(NamedTuple):
    """The heads of attention as kernels see them: num_kv groups of `group` query heads, whose values have `dim` elements.

    extra  elements of keys more than of values
    is_latent  a row is key and, without its first `extra` elements, value of all groups (latent attention)
    """

    num_kv: int
    group: int
    dim: int
    extra: int = 0
    is_latent: bool = False

    @classmethod
    def of(cls, spec: AttentionSpec) -> _Heads:
        if spec.latent is None:
            group, dim = spec.num_heads // spec.num_kv_heads, spec.value_size
            return cls(spec.num_kv_heads, group, dim, spec.head_dim - dim)
        group = max(size for size in range(1, _LATENT_GROUP + 1) if spec.num_heads % size == 0)
        return cls(spec.num_heads // group, group, spec.latent.kv_rank, spec.latent.rope_dim, is_latent=True)


class KvCache(NamedTuple):
    """The cache of one layer.

    k, v                [num_blocks, K, block_size, D], q's dtype, int8 or float8_e4m3fn; or u8 [..., D / 2], codes of four bits
                        of rotated vectors, see rotated_codes.py. Keys may be int8 and values u8
    k_scales, v_scales  [num_blocks, K, block_size] f32, scales of the stored values; None unless these are quantised
    index               [num_blocks, 1, block_size, D] keys of an indexer (IndexerSpec), in q's dtype; None: there is none
    Latent attention has one tensor for both: K is 1, and a row has the rotated key, then the latent row. Values smaller than
    keys stand first in their rows.
    """

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    index: Tensor | None = None


def attend(
    q: Tensor,
    cache: KvCache,
    step: DeviceAttentionMetadata,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    is_in_order: bool = False,
    slopes: Tensor | None = None,
) -> Tensor:
    """Attend every query to its sequence's cached keys, itself included, causally.

    q        [T, H, D] float, the heads of a token contiguous, rotated if the keys are; this step's KV is already stored
    sinks    [H] float, an attention sink per head: a logit in the softmax without a value; None: none
    is_in_order  batch-invariant: a query has the same bits with its whole prompt, a part of it, or alone; slower
    slopes   [H] f32, spec.alibi_slopes, where there are any
    Returns  [T, H, size of values] in q's dtype, zeros for padding sequences; of latent attention [T, H, kv_rank]. Sums are in
             f32. Does not write the cache

    Raises InvariantError for shapes and dtypes that do not match.
    """
    is_plain = sinks is None and slopes is None and spec.latent is None and spec.has_plain_values and not is_in_order
    if step.library is not None and step.num_drafts is None and is_plain:
        _check(q, q, cache, spec)
        return step.library.attend(q, cache.k, cache.v, step, spec)
    out = torch.empty(*q.shape[:2], _Heads.of(spec).dim, dtype=q.dtype, device=q.device)
    run_all(attend_launches(out, q, cache, step, spec, sinks, is_in_order, slopes))
    return out


def attend_launches(
    out: Tensor,
    q: Tensor,
    cache: KvCache,
    step: DeviceAttentionMetadata,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    is_in_order: bool = False,
    slopes: Tensor | None = None,
) -> list[Launch]:
    """Return the launches of `attend`, which write the contiguous `out`.

    Cached keys are split into chunks, each for its own program, so that a few long sequences fill the device; the partial
    results are merged in order. Sequences with few queries, mainly those of decode steps, have short chunks, which the device
    computes once per step: launches are the same for all lengths. The others have chunks of LONG_CHUNK keys, or one if the
    window is not longer or the runs of queries fill the device. Batch-invariant attention has the same tiles and chunks for
    both, and merges chunks one by one.
    """
    _check(out, q, cache, spec, sinks, slopes)
    if step.has_cached_drafts and (spec.window is not None or slopes is not None):
        raise InvariantError(
            f"with a window ({spec.window} tokens) or ALiBi all drafts of a tree must be rows of the step, as their "
            "positions are needed, but the first ones are cached; compute them again"
        )
    _, group, dim, *_ = heads = _Heads.of(spec)
    kinds = dim, q.dtype, cache.k.dtype
    fixed = in_order_attention_tile(*kinds) if is_in_order else None
    num_queries, num_short = tile_queries(spec, q.dtype, cache.k.dtype, is_in_order)
    short, long = step.tiles(num_queries, num_short)
    launches: list[Launch] = []
    if short.num_tiles:
        launches += _split_on_device(_short_call(out, q, cache, step, spec, sinks, short, is_in_order, slopes))
    if long.num_tiles:
        tile = fixed or prefill_attention_tile(*kinds)
        rows = power_of_two(num_queries * group, 16 if fixed is None else fixed.rows)
        chunk = CHUNK if is_in_order else LONG_CHUNK
        call = _Call(out, q, cache, step, spec, sinks, long, tile._replace(rows=rows), chunk, is_in_order, slopes, heads)
        is_whole = is_in_order or (spec.window is not None and spec.window <= LONG_CHUNK)
        launches += [_attend_runs(call)] if is_whole else _split(call)
    return [*launches, unrotate_launch(out)] if cache.v.dtype == PACKED else launches


class PartialResults(NamedTuple):
    """Results of some chunks of keys: partial [items, num_kv, queries * group, D] f32, and log_sums without D."""

    partial: Tensor
    log_sums: Tensor


def partial_shape(spec: AttentionSpec, num_queries: int) -> tuple[int, int, int]:
    """Return (num_kv, queries * group, D) of PartialResults for runs of so many queries."""
    heads = _Heads.of(spec)
    return heads.num_kv, num_queries * heads.group, heads.dim


def attend_chunks_launch(
    found: PartialResults,
    q: Tensor,
    cache: KvCache,
    step: DeviceAttentionMetadata,
    spec: AttentionSpec,
    tiles: Tiles,
    plan: ChunkPlan,
    is_in_order: bool = False,
) -> Launch:
    """Return the launch that attends runs of queries to some chunks of CHUNK keys; q and the cache as for `attend`.

    plan  with the chunks; the blocks of others are not read
    """
    call = _short_call(q, q, cache, step, spec, None, tiles, is_in_order)
    return _attend_chunks(call, plan, 0, found.partial, found.log_sums)


def merge_chunks_launch(
    out: Tensor,
    found: PartialResults,
    starts: Tensor,
    cache: KvCache,
    step: DeviceAttentionMetadata,
    spec: AttentionSpec,
    sinks: Tensor | None,
    tiles: Tiles,
    is_in_order: bool = False,
    sums: Tensor | None = None,
) -> Launch:
    """Return the launch that merges chunks of runs of queries into `out` [T, H, D], contiguous, in the order of keys.

    starts  [tiles + 1] i32: the first item of each run
    sums    [T, H] f32 that gets the logarithms of the sums, where `out`, in f32, is to be merged with others; None: it is not
    """
    call = _short_call(out, out, cache, step, spec, sinks, tiles, is_in_order)
    return _merge_items(call, ChunkPlan(starts, starts), found.partial, found.log_sums, sums)


def attend_part_launches(
    out: Tensor, sums: Tensor, q: Tensor, cache: KvCache, step: DeviceAttentionMetadata, spec: AttentionSpec
) -> list[Launch]:
    """Return the launches that attend the only query of each sequence to the part of its keys of which `step` has the blocks
    and the length; out [T, H, D] f32 and sums as of merge_chunks_launch, zeros and -inf where there are none."""
    tiles = Tiles(None, None, len(q), 1)
    return _split_on_device(_short_call(out, q, cache, step, spec, None, tiles, False), sums)


def _short_call(
    out: Tensor,
    q: Tensor,
    cache: KvCache,
    step: DeviceAttentionMetadata,
    spec: AttentionSpec,
    sinks: Tensor | None,
    tiles: Tiles,
    is_in_order: bool,
    slopes: Tensor | None = None,
) -> _Call:
    _, group, dim, *_ = heads = _Heads.of(spec)
    kinds = dim, q.dtype, cache.k.dtype
    tile = in_order_attention_tile(*kinds) if is_in_order else decode_attention_tile(dim, group, *kinds[1:])
    rows = power_of_two(tiles.num_queries * group, tile.rows)
    return _Call(out, q, cache, step, spec, sinks, tiles, tile._replace(rows=rows), CHUNK, is_in_order, slopes, heads)


def tile_queries(spec: AttentionSpec, dtype: torch.dtype, kv_dtype: torch.dtype, is_in_order: bool = False) -> tuple[int, int]:
    """Return the queries per tile, and the maximum number of queries of a short sequence, for DeviceAttentionMetadata.tiles."""
    _, group, dim, *_ = _Heads.of(spec)
    tile = (in_order_attention_tile if is_in_order else prefill_attention_tile)(dim, dtype, kv_dtype)
    return max(1, tile.rows // group), max(1, ROWS_OF_DECODE // group)


class _Call(NamedTuple):
    out: Tensor
    q: Tensor
    cache: KvCache
    step: DeviceAttentionMetadata
    spec: AttentionSpec
    sinks: Tensor | None
    tiles: Tiles
    tile: AttentionTile
    chunk: int
    is_in_order: bool
    slopes: Tensor | None
    heads: _Heads


def _split(call: _Call) -> list[Launch]:
    """Return the launches over chunks of keys, and the merge if there is more than one chunk."""
    spec, tiles, heads = call.spec, call.tiles, call.heads
    num_chunks = -(-call.step.max_context_len // call.chunk)
    if spec.window is not None:
        num_chunks = min(num_chunks, -(-(spec.window + tiles.num_queries - 1) // call.chunk) + 1)
    if num_chunks <= 1 or is_filled(tiles.num_tiles * heads.num_kv):
        return [_attend_whole(call)]
    shape = (heads.num_kv, num_chunks, tiles.num_queries * heads.group)
    at_once = tiles.num_tiles
    if call.chunk == LONG_CHUNK:
        fitting = _PARTIAL_BYTES // (math.prod(shape) * heads.dim * 4)
        at_once = min(at_once, max(1, fitting // _ALIGNED_TILES) * _ALIGNED_TILES)
    partial = torch.empty(at_once, *shape, heads.dim, dtype=torch.float32, device=call.q.device)
    log_sums = torch.empty(at_once, *shape, dtype=torch.float32, device=call.q.device)
    launches: list[Launch] = []
    for first in range(0, tiles.num_tiles, at_once):
        part = call._replace(tiles=tiles.part(first, at_once))
        count = part.tiles.num_tiles
        launches += [_attend_runs(part, (partial[:count], log_sums[:count])), _merge_chunks(part, partial, log_sums)]
    return launches


def _attend_whole(call: _Call) -> Launch:
    """Return the launch of a program for each run of queries, over all its keys."""
    out, q, (k, v, *_), step = call.out, call.q, call.cache, call.step
    is_causal = step.num_drafts is None and call.sinks is None and call.slopes is None
    launch = attend_prompts_launch(out, q, k, v, step, call.tiles, call.spec) if is_causal else None
    return _attend_runs(call) if launch is None else launch


def _attend_runs(call: _Call, split: tuple[Tensor, Tensor] | None = None) -> Launch:
    tile = call.tile
    num_chunks = 1 if split is None else split[0].shape[2]
    arguments = {
        **_key_arguments(call),
        "sinks_ptr": None if split is not None else call.sinks,
        "out_ptr": call.out,
        "partial_ptr": None if split is None else split[0],
        "log_sums_ptr": None if split is None else split[1],
        "num_chunks": num_chunks,
    }
    constants = {**_key_constants(call), "IN_CHUNKS": call.is_in_order}
    grid = (call.tiles.num_tiles, call.heads.num_kv, num_chunks)
    return Launch(attend_runs, grid, arguments, constants, tile.num_warps, tile.num_stages, IS_FUSED)


def _merge_chunks(call: _Call, partial: Tensor, log_sums: Tensor) -> Launch:
    return _merge(call, merge_chunks, {"partial_ptr": partial, "log_sums_ptr": log_sums, "num_chunks": partial.shape[2]})


def _split_on_device(call: _Call, sums: Tensor | None = None) -> list[Launch]:
    """Return the launches over chunks of keys, with the chunk plan if the step has none yet, and the merge."""
    window, tiles, (num_kv_heads, group, dim, *_) = call.spec.window, call.tiles, call.heads
    span = call.step.max_context_len if window is None else min(call.step.max_context_len, window + tiles.num_queries + CHUNK)
    num_chunks = -(-span // CHUNK)
    is_whole = num_chunks <= 1 or (call.step.is_even and is_filled(tiles.num_tiles * num_kv_heads))
    if is_whole and sums is None:
        return [_attend_runs(call)]
    # Batch-invariant chunks have a fixed size at any length, so that a query of a prompt has those of its own position.
    most = 0 if call.is_in_order else most_chunks(num_kv_heads)
    key = (tiles.num_queries, window or 0, most)
    plan = call.step.plans.get(key)
    launches: list[Launch] = []
    if plan is None:
        num_items = tiles.num_tiles * min(most or num_chunks, num_chunks)
        plan = call.step.plans[key] = ChunkPlan(*(_empty(call, size) for size in (tiles.num_tiles + 1, num_items)))
        launches.append(_plan_chunks(call, plan, most))
    shape = (plan.tiles.shape[0], num_kv_heads, tiles.num_queries * group)
    partial = torch.empty(*shape, dim, dtype=torch.float32, device=call.q.device)
    log_sums = torch.empty(shape, dtype=torch.float32, device=call.q.device)
    merge = _merge_items(call, plan, partial, log_sums, sums)
    return [*launches, _attend_chunks(call, plan, most, partial, log_sums), merge]


def _empty(call: _Call, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int32, device=call.q.device)


def _plan_chunks(call: _Call, plan: ChunkPlan, most: int) -> Launch:
    arguments = {
        "starts_ptr": plan.starts,
        "tiles_ptr": plan.tiles,
        **_run_arguments(call),
        "num_tiles": call.tiles.num_tiles,
    }
    constants = {
        "QUERIES": call.tiles.num_queries,
        "WINDOW": call.spec.window or 0,
        "CHUNK": CHUNK,
        "MOST": most,
        "BLOCK": _PLANNED_AT_ONCE,
    }
    return Launch(plan_chunks, (call.tiles.num_tiles,), arguments, constants, num_warps=4, num_stages=1)


def _attend_chunks(call: _Call, plan: ChunkPlan, most: int, partial: Tensor, log_sums: Tensor) -> Launch:
    tile, num_kv_heads = call.tile, call.heads.num_kv
    arguments = {
        **_key_arguments(call),
        "partial_ptr": partial,
        "log_sums_ptr": log_sums,
        "starts_ptr": plan.starts,
        "tiles_ptr": plan.tiles,
        "chunks_ptr": plan.chunks,
        "num_tiles": call.tiles.num_tiles,
    }
    constants = {**_key_constants(call), "MOST": most}
    grid = (min(plan.tiles.shape[0], max(1, SPLIT_PROGRAMS // num_kv_heads)), num_kv_heads)
    # With two rows of queries a third stage gets no buffer of its own, and needs a register too many on Triton 3.9.
    has_two_rows = constants["QUERIES"] * constants["GROUP"] == 2
    # The same holds where positions of trees are compared.
    has_positions = arguments["positions_ptr"] is not None
    num_stages = min(2, tile.num_stages) if has_two_rows or has_positions else tile.num_stages
    if call.cache.k.dtype == PACKED and constants["QUERIES"] == 1:
        num_stages = 1  # a second tile of keys in flight takes registers that unpacking needs
    return Launch(attend_chunks, grid, arguments, constants, tile.num_warps, num_stages, IS_FUSED)


def _merge_items(call: _Call, plan: ChunkPlan, partial: Tensor, log_sums: Tensor, sums: Tensor | None = None) -> Launch:
    parts = {"partial_ptr": partial, "log_sums_ptr": log_sums, "starts_ptr": plan.starts, "sums_ptr": sums}
    return _merge(call, merge_items, parts)


def _merge(call: _Call, kernel: triton.JITFunction, parts: Mapping[str, Tensor | int | None]) -> Launch:
    arguments = {**parts, "sinks_ptr": call.sinks, "out_ptr": call.out, **_run_arguments(call)}
    constants = {
        **_run_constants(call),
        "BLOCK_D": power_of_two(call.heads.dim, 16),
        "BLOCK_C": 1 if call.is_in_order else _MERGED_AT_ONCE,
    }
    grid = (call.tiles.num_tiles, call.tiles.num_queries * call.spec.num_heads)
    return Launch(kernel, grid, arguments, constants, num_warps=2, num_stages=2, is_fused=IS_FUSED)


def _key_arguments(call: _Call) -> dict[str, Tensor | int | float | None]:
    spec, step, cache, has_list = call.spec, call.step, call.cache, call.tiles.sequences is not None
    needs_positions = spec.window is not None or (call.slopes is not None and step.ancestors is not None)
    return {
        "q_ptr": call.q,
        "k_ptr": cache.k,
        "v_ptr": cache.v,
        "k_scales_ptr": cache.k_scales,
        "v_scales_ptr": cache.v_scales,
        "slopes_ptr": call.slopes,
        **_run_arguments(call),
        "block_tables_ptr": step.block_tables,
        "ancestors_ptr": step.ancestors if has_list else None,
        "positions_ptr": step.positions if has_list and needs_positions else None,
        "scale": spec.scale * (1.0 if spec.softcap else LOG2_E.value),
        "q_stride": call.q.stride(0),
        "table_stride": step.block_tables.stride(0),
    }


def _key_constants(call: _Call) -> dict[str, object]:
    spec, cache, tile, heads = call.spec, call.cache, call.tile, call.heads
    is_quantised = cache.k.dtype in _QUANTISED
    compute = torch.float16 if is_quantised and call.q.dtype != torch.float32 else call.q.dtype
    return {
        **_run_constants(call),
        "BLOCK_SIZE": cache.k.shape[2],
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "BLOCK_D": power_of_two(heads.dim, 16),
        "EXTRA": heads.extra,
        "IS_LATENT": heads.is_latent,
        "BLOCK_E": power_of_two(heads.extra, 16),
        "SOFTCAP": spec.softcap or 0.0,
        "COMPUTE": ELEMENT_TYPES[compute],
    }


def _run_arguments(call: _Call) -> dict[str, Tensor | None]:
    has_list = call.tiles.sequences is not None
    return {
        "tile_sequences_ptr": call.tiles.sequences,
        "tile_offsets_ptr": call.tiles.offsets,
        "query_starts_ptr": call.step.query_starts if has_list else None,
        "context_lens_ptr": call.step.context_lens,
        "num_drafts_ptr": call.step.num_drafts if has_list else None,
    }


def _run_constants(call: _Call) -> dict[str, object]:
    heads = call.heads
    return {
        "NUM_KV_HEADS": heads.num_kv,
        "GROUP": heads.group,
        "QUERIES": call.tiles.num_queries,
        "HEAD_DIM": heads.dim,
        "CHUNK": call.chunk,
        "WINDOW": call.spec.window or 0,
    }


def _check(
    out: Tensor, q: Tensor, cache: KvCache, spec: AttentionSpec, sinks: Tensor | None = None, slopes: Tensor | None = None
) -> None:
    check_tensor("q", q, (None, spec.num_heads, spec.head_dim), *FLOATS)
    check_contiguous("out", out, (*q.shape[:2], _Heads.of(spec).dim), q.dtype)
    if q.stride(1) != spec.head_dim and spec.num_heads > 1:
        raise InvariantError(f"the heads of a token must lie in one piece, got strides {q.stride()}")
    check_cache(cache, spec.num_kv_heads, spec.head_dim, q.dtype)
    if spec.latent is not None and (cache.v is not cache.k or cache.k.dtype == PACKED):
        raise InvariantError("latent attention has one cache of rows, not in codes of four bits, for keys and values")
    if (slopes is None) != (not spec.alibi_slopes):
        raise InvariantError("slopes are given where heads have them")
    if slopes is not None:
        check_contiguous("slopes", slopes, (spec.num_heads,), torch.float32)
    if sinks is not None:
        check_contiguous("sinks", sinks, (spec.num_heads,), *FLOATS)


def check_cache(cache: KvCache, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Raise InvariantError for a cache that does not have these heads.

    dtype  of queries, and of keys that are not quantised
    """
    k, v = cache.k, cache.v
    check_contiguous("k cache", k, (None, num_kv_heads, None, width_of(k.dtype, head_dim)), dtype, *_QUANTISED)
    v_dtypes = (torch.int8, PACKED) if k.dtype == torch.int8 else (k.dtype,)
    check_contiguous("v cache", v, (*k.shape[:3], width_of(v.dtype, head_dim)), *v_dtypes)
    if v.dtype == PACKED and not can_rotate_on_gpu(head_dim):
        raise InvariantError(f"codes of four bits are those of heads of a power of two of values from 16 on, got {head_dim}")
    for name, scales in (("k_scales", cache.k_scales), ("v_scales", cache.v_scales)):
        if (k.dtype in _QUANTISED) != (scales is not None):
            raise InvariantError(f"{name} are only used with quantised keys and values, got {k.dtype}")
        if scales is not None:
            check_contiguous(name, scales, tuple(k.shape[:3]), torch.float32)
