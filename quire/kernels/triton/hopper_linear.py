"""The launches of hopper_linear_kernels.multiply_dequantised, and which products it computes."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.triton.boxes import Boxes
from quire.kernels.triton.device_traits import device_traits
from quire.kernels.triton.hopper_attention import runs_on
from quire.kernels.triton.hopper_linear_kernels import GROUP_ROWS, ROWS, multiply_dequantised
from quire.kernels.triton.launching import Launch, run_all
from quire.kernels.triton.linear import add_splits_launch
from quire.kernels.triton.quantized_weights import DeviceQuantizedWeight
from quire.kernels.triton.tiles import many_tile

MOST_OF_FEW = 64
"""Tokens up to which other kernels compute the product, which is then bound by reading the weight."""
_MOST_SPLITS = 4
_ALIGNED = 8  # elements of 16 bits


def multiply_many(x: Tensor, weight: DeviceQuantizedWeight, bias: Tensor | None = None) -> Tensor | None:
    """Return x @ weight^T (+ bias) as linear.multiply does, [T, O]; None where many_tokens_launches returns None."""
    if len(x) <= MOST_OF_FEW or not runs_on(x.device):
        return None
    x = x if weight.columns is None else x.index_select(1, weight.columns)
    out = torch.empty(len(x), weight.shape[0], dtype=x.dtype, device=x.device)
    launches = many_tokens_launches(out, x, weight, bias)
    if launches is None:
        return None
    run_all(launches)
    return out


def many_tokens_launches(
    out: Tensor, x: Tensor, weight: DeviceQuantizedWeight, bias: Tensor | None = None
) -> list[Launch] | None:
    """Return the launches that write x @ weight^T (+ bias) to out: a weight is computed in f32 and rounded to x's dtype, as by
    linear.widen, and sums are f32.

    out, x, bias  as in linear.multiply_launches; the columns of x are already in the stored order

    None where the table of tiles does not choose this kernel, or it does not compute such a product: it is for Hopper, more
    than 64 tokens of 16-bit floats in one piece, and packed codes whose columns consist of pairs of runs. Sums are split by
    the number of tiles, so that the bits of a row depend on the number of tokens.
    """
    num_tokens, (num_rows, num_columns) = len(x), weight.shape
    is_known = weight.is_packed and weight.scale_rows == 1 and num_columns % (2 * weight.run) == 0
    is_placed = x.is_contiguous() and x.storage_offset() % _ALIGNED == 0 and x.dtype in (torch.bfloat16, torch.float16)
    if num_tokens <= MOST_OF_FEW or not (is_known and is_placed and runs_on(x.device)):
        return None
    tile = many_tile(num_tokens, x.dtype, num_rows)
    if tile is None:
        return None
    at_once, num_pairs = device_traits().num_multiprocessors, num_columns // (2 * weight.run)
    num_tiles = -(-num_rows // ROWS) * -(-num_tokens // tile.tokens)
    splits = 1
    while splits < _MOST_SPLITS and 2 * splits * num_tiles <= at_once and num_pairs % (2 * splits) == 0:
        splits *= 2
    parts = out if splits == 1 else torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)
    words = weight.codes.view(torch.int16)
    arguments = {
        "x_desc": Boxes(x, (num_tokens, num_columns), (tile.tokens, weight.run // 2)),
        "codes_desc": Boxes(words, (num_rows, words.shape[1]), (GROUP_ROWS, weight.run // 4)),
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
    launch = Launch(multiply_dequantised, (min(num_tiles * splits, at_once),), arguments, constants, num_warps=4, num_stages=1)
    return [launch] if splits == 1 else [launch, add_splits_launch(out, parts, bias)]
