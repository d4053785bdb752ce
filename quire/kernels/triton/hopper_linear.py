"""Products of many tokens with 4-bit weights by hopper_linear_kernels.multiply_dequantised."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.triton.device_traits import device_traits
from quire.kernels.triton.hopper_attention import runs_on
from quire.kernels.triton.hopper_linear_kernels import ROWS, multiply_dequantised
from quire.kernels.triton.launching import Launch, run_all
from quire.kernels.triton.linear import add_splits_launch
from quire.kernels.triton.quantized_weights import DeviceQuantizedWeight
from quire.kernels.triton.tiles import LargeBatchTile, large_batch_tile
from quire.kernels.triton.tma_tensor import TmaTensor

MAX_SMALL_BATCH = 64
"""Tokens up to which other kernels compute the product, which is then bound by reading the weight."""
_MOST_SPLITS = 4


def multiply_large_batch(x: Tensor, weight: DeviceQuantizedWeight, bias: Tensor | None = None) -> Tensor | None:
    """Return x @ weight^T (+ bias) as linear.multiply does; None where another kernel is to compute it."""
    tile = tile_of(x, weight)
    if tile is None:
        return None
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    run_all(large_batch_launches(out, x, weight, tile, bias))
    return out


def tile_of(x: Tensor, weight: DeviceQuantizedWeight) -> LargeBatchTile | None:
    """Return the tile of the product of x [T, K]; None where the table of tiles chooses none, or there is none.

    The kernel is for Hopper, more than 64 tokens of 16-bit floats in one piece, and packed codes in order, in pairs of runs.
    """
    is_known = weight.is_packed and weight.columns is None and weight.shape[1] % (2 * weight.run) == 0
    is_placed = x.is_contiguous() and x.storage_offset() % 8 == 0 and x.dtype in (torch.bfloat16, torch.float16)
    if x.shape[0] <= MAX_SMALL_BATCH or not (is_known and is_placed and runs_on(x.device)):
        return None
    return large_batch_tile(x.shape[0], x.dtype, weight.shape[0])


def large_batch_launches(
    out: Tensor, x: Tensor, weight: DeviceQuantizedWeight, tile: LargeBatchTile, bias: Tensor | None = None
) -> list[Launch]:
    """Return the launches that write x @ weight^T (+ bias) to out; weights are rounded as by linear.dequantize.

    out, x, bias  as in linear.multiply_launches. The bits of a row depend on the number of tokens, by which sums are split
    """
    num_tokens, (num_rows, num_columns) = x.shape[0], weight.shape
    at_once = device_traits().num_multiprocessors
    num_tiles, num_pairs = -(-num_rows // ROWS) * -(-num_tokens // tile.tokens), num_columns // (2 * weight.run)
    splits = 1
    while splits < _MOST_SPLITS and 2 * splits * num_tiles <= at_once and num_pairs % (2 * splits) == 0:
        splits *= 2
    parts = out if splits == 1 else torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)
    pairs = weight.codes.view(torch.int16)
    arguments = {
        "x_desc": TmaTensor(x, (num_tokens, num_columns), (tile.tokens, weight.run // 2)),
        "codes_desc": TmaTensor(pairs, (num_rows, num_columns // 4), (ROWS // 2, weight.run // 4)),
        "scales_ptr": weight.scales,
        "offsets_ptr": weight.offsets,
        "bias_ptr": bias if splits == 1 else None,
        "out_ptr": parts,
        "num_tokens": num_tokens,
    }
    constants = {
        "NUM_ROWS": num_rows,
        "NUM_COLUMNS": num_columns,
        "GROUP": weight.group_size,
        "BASE": weight.base,
        "TOKENS": tile.tokens,
        "RUN": weight.run,
        "NUM_SPLITS": splits,
        "STAGES": tile.num_stages,
    }
    launch = Launch(multiply_dequantised, (min(num_tiles * splits, at_once),), arguments, constants, 4, 1)
    return [launch] if splits == 1 else [launch, add_splits_launch(out, parts, bias)]
