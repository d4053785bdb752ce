"""Linear layers with quantised weights, for steps bound by reading weights, and batch-invariant ones with plain weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.triton.launching import FLOATS, Launch, check_contiguous, check_tensor, run_all
from quire.kernels.triton.linear_kernels import add_splits, dequantize_rows, multiply_dense, multiply_packed
from quire.kernels.triton.quantized_weights import DeviceQuantizedWeight
from quire.kernels.triton.sizes import ceil_divide
from quire.kernels.triton.tiles import dense_tile, linear_tile

_BLOCK = 1024
_MANY_PROGRAMS = 264
"""Two for each multiprocessor of an H200: with as many programs, sums need not be split over programs."""
_ROWS_OF_PROGRAM = 64
_GROUPED = 8


def multiply(x: Tensor, weight: DeviceQuantizedWeight, bias: Tensor | None = None, whole_rows: int | None = None) -> Tensor:
    """Return x @ weight^T (+ bias), summed in f32: the scales multiply sums of at most 128 products of x and the codes.

    x        [T, K] float, with contiguous rows
    bias     [O] float
    whole_rows  rows of the weight on all tensor-parallel ranks together, if this is a shard; None: it is the whole weight
    Returns  [T, O] in x's dtype; rows are independent, and do not depend on their number
    """
    x = x if weight.columns is None else x.index_select(1, weight.columns)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    run_all(multiply_launches(out, x, weight, bias, whole_rows))
    return out


def multiply_launches(
    out: Tensor, x: Tensor, weight: DeviceQuantizedWeight, bias: Tensor | None = None, whole_rows: int | None = None
) -> list[Launch]:
    """Return the launches of `multiply`, which write `out`; the columns of x are already in the stored order."""
    num_rows, num_columns = weight.shape
    _check(out, x, (num_rows, num_columns), bias)
    num_tokens = x.shape[0]
    tile = linear_tile(num_tokens, x.dtype, num_rows, weight.offsets is not None)
    num_steps = -(-num_columns // weight.run)
    tiles = -(-num_rows // tile.rows), -(-num_tokens // tile.tokens)
    splits = _split(whole_rows or num_rows, num_steps, tiles[0] * tiles[1])
    parts = _parts(out, splits)
    arguments = {
        "x_ptr": x,
        "codes_ptr": weight.readable_codes,
        "scales_ptr": weight.scales,
        "offsets_ptr": weight.offsets,
        "bias_ptr": None if splits.are_shared else bias,
        "out_ptr": parts,
        "x_stride": x.stride(0),
        "num_tokens": num_tokens,
    }
    constants = {
        **_weight_constants(weight),
        "BLOCK_M": tile.tokens,
        "BLOCK_N": tile.rows,
        "BLOCK_K": weight.run,
        **splits.constants(num_steps),
    }
    grid = (*tiles, splits.count if splits.are_shared else 1)
    launch = Launch(multiply_packed, grid, arguments, {"NUM_ROWS": num_rows, **constants}, tile.num_warps, tile.num_stages)
    return [launch, *_add_launches(out, parts, bias, splits)]


def multiply_in_order(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, whole_rows: int | None = None
) -> Tensor:
    """Return x @ weight^T (+ bias), summed in f32 in the same order for any number of rows, which libraries do not guarantee.

    x        [T, K] float, with contiguous rows
    weight   [O, K] in x's dtype, contiguous
    out      [T, O] in x's dtype, the output; None: a new tensor
    whole_rows  as in `multiply`
    """
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    run_all(in_order_launches(out, x, weight, bias, whole_rows))
    return out


def in_order_launches(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, whole_rows: int | None = None
) -> list[Launch]:
    """Return the launches of `multiply_in_order`, which write `out`."""
    num_rows, num_columns = weight.shape
    check_contiguous("weight", weight, (num_rows, num_columns), x.dtype)
    _check(out, x, (num_rows, num_columns), bias)
    num_tokens = x.shape[0]
    tile = dense_tile(num_tokens, x.dtype)
    num_steps = -(-num_columns // tile.columns)
    num_tiles = -(-num_rows // tile.rows) * -(-num_tokens // tile.tokens)
    splits = _split(whole_rows or num_rows, num_steps, num_tiles)
    parts = _parts(out, splits)
    arguments = {
        "x_ptr": x,
        "weight_ptr": weight,
        "bias_ptr": None if splits.are_shared else bias,
        "out_ptr": parts,
        "x_stride": x.stride(0),
        "num_tokens": num_tokens,
    }
    constants = {
        "NUM_ROWS": num_rows,
        "NUM_COLUMNS": num_columns,
        "BLOCK_M": tile.tokens,
        "BLOCK_N": tile.rows,
        "BLOCK_K": tile.columns,
        **splits.constants(num_steps),
        "GROUPED": _GROUPED,
    }
    grid = (num_tiles, 1, splits.count if splits.are_shared else 1)
    launch = Launch(multiply_dense, grid, arguments, constants, tile.num_warps, tile.num_stages)
    return [launch, *_add_launches(out, parts, bias, splits)]


def dequantize(weight: DeviceQuantizedWeight, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """Return rows of a weight dequantised in f32, with the columns in the stored order.

    ids  [R] i64, the rows; None: all
    """
    num_rows = weight.shape[0] if ids is None else len(ids)
    out = torch.empty(num_rows, weight.shape[1], dtype=dtype, device=weight.codes.device)
    dequantize_launch(out, weight, ids).run()
    return out


def dequantize_launch(out: Tensor, weight: DeviceQuantizedWeight, ids: Tensor | None = None) -> Launch:
    """Return the launch of `dequantize`, which writes `out`."""
    num_columns = weight.shape[1]
    check_contiguous("out", out, (weight.shape[0] if ids is None else len(ids), num_columns), *FLOATS)
    if ids is not None:
        check_contiguous("ids", ids, (None,), torch.int64)
    arguments = {
        "ids_ptr": ids,
        "codes_ptr": weight.readable_codes,
        "scales_ptr": weight.scales,
        "offsets_ptr": weight.offsets,
        "out_ptr": out,
    }
    constants = {**_weight_constants(weight), "RUN": weight.run, "BLOCK": _BLOCK}
    grid = (len(out), ceil_divide(num_columns, _BLOCK))
    # Scale and offset are rounded one after the other, as everywhere a weight is dequantised.
    return Launch(dequantize_rows, grid, arguments, constants, num_warps=4, num_stages=1, is_fused=False)


def add_splits_launch(out: Tensor, parts: Tensor, bias: Tensor | None) -> Launch:
    """Return the launch that writes to out [T, O] the sum of parts [S, T, O] f32, one after the other, and the bias [O]."""
    num_splits, num_tokens, num_rows = parts.shape
    arguments = {"parts_ptr": parts, "bias_ptr": bias, "out_ptr": out, "num_tokens": num_tokens}
    constants = {"NUM_ROWS": num_rows, "NUM_SPLITS": num_splits, "BLOCK": _BLOCK}
    return Launch(add_splits, (num_tokens, ceil_divide(num_rows, _BLOCK)), arguments, constants, 4, 1)


class _Splits(NamedTuple):
    """count: parts of a sum; are_shared: each part is computed by its own program, and the parts are added afterwards."""

    count: int
    are_shared: bool

    def constants(self, num_steps: int) -> dict[str, object]:
        steps = -(-num_steps // self.count)
        return {"STEPS": steps, "NUM_SPLITS": self.count, "IS_SPLIT": self.are_shared}


def _split(num_rows: int, num_steps: int, num_programs: int) -> _Splits:
    """Return how sums are split. The number of parts depends only on the weight's shape, so a row's bits are independent.

    num_rows  of the whole weight, so that the bits do not depend on the number of ranks that share it
    """
    count = 1
    while count < 4 and count * -(-num_rows // _ROWS_OF_PROGRAM) < _MANY_PROGRAMS and num_steps >= 8 * count:
        count *= 2
    return _Splits(count, count > 1 and num_programs < _MANY_PROGRAMS)


def _parts(out: Tensor, splits: _Splits) -> Tensor:
    if not splits.are_shared:
        return out
    return torch.empty(splits.count, *out.shape, dtype=torch.float32, device=out.device)


def _add_launches(out: Tensor, parts: Tensor, bias: Tensor | None, splits: _Splits) -> list[Launch]:
    return [add_splits_launch(out, parts, bias)] if splits.are_shared else []


def _weight_constants(weight: DeviceQuantizedWeight) -> dict[str, object]:
    return {
        "NUM_COLUMNS": weight.shape[1],
        "GROUP": weight.group_size,
        "SCALE_ROWS": weight.scale_rows,
        "IS_PACKED": weight.is_packed,
        "BASE": weight.base,
    }


def _check(out: Tensor, x: Tensor, shape: tuple[int, int], bias: Tensor | None) -> None:
    check_tensor("x", x, (None, shape[1]), *FLOATS)
    check_contiguous("out", out, (x.shape[0], shape[0]), x.dtype)
    if bias is not None:
        check_contiguous("bias", bias, (shape[0],), *FLOATS)
