"""Move keys and values of accepted drafts within the cache, so that they are consecutive."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.kernels.triton.attention import KvCache
from quire.kernels.triton.kv_move_kernels import _move_rows
from quire.kernels.triton.launching import Launch, check_contiguous
from quire.kernels.triton.sizes import power_of_two


def move_tokens_launch(cache: KvCache, sources: Tensor, targets: Tensor, starts: Tensor) -> Launch:
    """Return the launch that copies keys, values and their scales within the cache of one layer, bit for bit.

    sources, targets  [N] i64 slots, block * block_size + offset
    starts            [S + 1] i32: the moves of sequence s are [starts[s], starts[s + 1]), done in order. Sequences have no slot
                      in common, and within a sequence no slot is written before it is read in this order
    """
    num_moves, num_runs = len(sources), len(starts) - 1
    check_contiguous("sources", sources, (None,), torch.int64)
    check_contiguous("targets", targets, (num_moves,), torch.int64)
    check_contiguous("starts", starts, (None,), torch.int32)
    if num_runs < 1:
        raise InvariantError("moves are those of at least one sequence")
    _, num_kv_heads, block_size, head_dim = cache.k.shape
    k, v = (part.view(torch.int8) if part.itemsize == 1 else part for part in (cache.k, cache.v))
    arguments = {
        "k_ptr": k,
        "v_ptr": v,
        "k_scales_ptr": cache.k_scales,
        "v_scales_ptr": cache.v_scales,
        "sources_ptr": sources,
        "targets_ptr": targets,
        "starts_ptr": starts,
    }
    constants = {
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "K_WIDTH": head_dim,
        "V_WIDTH": v.shape[3],
        "BLOCK_D": power_of_two(max(head_dim, v.shape[3])),
    }
    return Launch(_move_rows, (num_runs, num_kv_heads), arguments, constants, num_warps=1, num_stages=1)
