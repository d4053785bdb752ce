"""The launch of hopper_attention_kernels.attend_prompts, and which attention it computes."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.contracts.model_spec import AttentionSpec
from quire.kernels.triton.arithmetic import INTERPRETED, LOG2_E
from quire.kernels.triton.device_traits import device_traits
from quire.kernels.triton.hopper_attention_kernels import BOX, ROWS, attend_prompts
from quire.kernels.triton.launching import Launch
from quire.kernels.triton.step import DeviceAttentionMetadata, Tiles
from quire.kernels.triton.tiles import SPLIT_PROGRAMS, prompt_tile
from quire.kernels.triton.tma_tensor import TmaTensor

_HEAD_DIMS = (64, 128)
_ALIGNED = 8  # elements of 16 bits
_MOST_PADDING = 2
"""Most tiles of a launch, as a multiple of those that its tokens fill. CUDA graphs have an empty tile for each further sequence
that there may be, whose program takes a multiprocessor and reads a tile of keys."""


def runs_on(device: torch.device) -> bool:
    """Return whether the kernel runs on a device: a Hopper GPU; "meta" stands for the GPU in use, see device_traits.py."""
    return not INTERPRETED.value and device.type in ("cuda", "meta") and device_traits().is_hopper


def attend_prompts_launch(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, step: DeviceAttentionMetadata, tiles: Tiles, spec: AttentionSpec
) -> Launch | None:
    """Return the launch that attends the runs of queries of `tiles` over all their keys, causally, without trees and sinks.

    out, q  [T, H, D], the heads of a token of q contiguous; k, v  [num_blocks, K, block_size, D]

    None where the table of tiles does not choose this kernel, or it does not compute such attention: it is for Hopper, 16-bit
    floats in q and the cache, heads of 64 or 128 and blocks of a multiple of 64 tokens, without a window or a softcap, and for
    steps most of whose tiles have tokens.
    """
    group = spec.num_heads // spec.num_kv_heads
    is_plain = spec.window is None and spec.softcap is None and spec.latent is None and spec.has_plain_values
    is_placed = q.stride(0) % _ALIGNED == 0 and k.shape[2] % BOX == 0 and tiles.num_queries * group <= ROWS
    is_known = q.dtype in (torch.bfloat16, torch.float16) and k.dtype == q.dtype and spec.head_dim in _HEAD_DIMS
    if not (is_plain and is_placed and is_known and tiles.sequences is not None and runs_on(q.device)):
        return None
    tile = prompt_tile(spec.head_dim, q.dtype, k.dtype)
    if tile is None or tiles.num_tiles > _MOST_PADDING * -(-q.shape[0] // tiles.num_queries):
        return None
    # Few programs begin with the longest of all heads, so that the last are short. Many run head by head, to share keys.
    num_programs = tiles.num_tiles * spec.num_kv_heads
    has_few = num_programs < SPLIT_PROGRAMS
    arguments = {
        "q_ptr": q,
        "k_desc": _boxes(k),
        "v_desc": _boxes(v),
        "out_ptr": out,
        "tile_sequences_ptr": tiles.sequences,
        "tile_offsets_ptr": tiles.offsets,
        "query_starts_ptr": step.query_starts,
        "context_lens_ptr": step.context_lens,
        "block_tables_ptr": step.block_tables,
        "scale": spec.scale * LOG2_E.value,
        "q_stride": q.stride(0),
        "table_stride": step.block_tables.stride(0),
        "num_tiles": 0 if has_few else tiles.num_tiles,
    }
    constants = {
        "NUM_KV_HEADS": spec.num_kv_heads,
        "GROUP": group,
        "QUERIES": tiles.num_queries,
        "HEAD_DIM": spec.head_dim,
        "BLOCK_SIZE": k.shape[2],
        "BLOCK_N": tile.keys,
        "STAGES": tile.num_stages,
        "TAKES_TURNS": tile.takes_turns,
    }
    return Launch(attend_prompts, (num_programs,), arguments, constants, num_warps=4, num_stages=1)


def _boxes(cache: Tensor) -> TmaTensor:
    width = cache.shape[-1]
    return TmaTensor(cache, (cache.numel() // width, width), (BOX, BOX))
