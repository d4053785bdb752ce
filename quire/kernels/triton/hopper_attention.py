"""The launch of hopper_attention_kernels.attend_prompts, and which attention it computes."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.contracts.model_spec import AttentionSpec
from quire.kernels.triton.arithmetic import INTERPRETED, LOG2_E
from quire.kernels.triton.hopper_attention_kernels import BOX, ROWS, attend_prompts
from quire.kernels.triton.launching import Boxes, Launch
from quire.kernels.triton.step import DeviceAttentionMetadata, Tiles
from quire.kernels.triton.tiles import prompt_tile

_HEAD_DIMS = (64, 128)
_CAPABILITY = 9
_ALIGNED = 8  # elements of 16 bits


def is_hopper(device: torch.device) -> bool:
    """Return whether code for Hopper runs on a device; code for "meta" tensors is compiled for capability 9.0."""
    if INTERPRETED.value:
        return False
    if device.type == "meta":
        return True
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == _CAPABILITY


def attend_prompts_launch(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, step: DeviceAttentionMetadata, tiles: Tiles, spec: AttentionSpec
) -> Launch | None:
    """Return the launch that attends the runs of queries of `tiles` over all their keys, causally, without trees and sinks.

    out, q  [T, H, D], the heads of a token of q contiguous; k, v  [num_blocks, K, block_size, D]

    None where the table of tiles does not choose this kernel, or it does not compute such attention: it is for Hopper, 16-bit
    floats in q and the cache, heads of 64 or 128 and blocks of a multiple of 64 tokens, without a window or a softcap.
    """
    group = spec.num_heads // spec.num_kv_heads
    is_plain = spec.window is None and spec.softcap is None and spec.latent is None
    is_placed = q.stride(0) % _ALIGNED == 0 and k.shape[2] % BOX == 0 and tiles.num_queries * group <= ROWS
    is_known = q.dtype in (torch.bfloat16, torch.float16) and k.dtype == q.dtype and spec.head_dim in _HEAD_DIMS
    if not (is_plain and is_placed and is_known and tiles.sequences is not None and is_hopper(q.device)):
        return None
    tile = prompt_tile(spec.head_dim, q.dtype, k.dtype)
    if tile is None:
        return None
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
    return Launch(attend_prompts, (spec.num_kv_heads, tiles.num_tiles), arguments, constants, num_warps=4, num_stages=1)


def _boxes(cache: Tensor) -> Boxes:
    width = cache.shape[-1]
    return Boxes(cache, (cache.numel() // width, width), (BOX, BOX))
