"""Linear layers with narrow weights for steps of few tokens, which the reading of weights bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from quire.base.errors import InvariantError
from quire.kernels.triton.launching import Launch, check_contiguous, check_tensor, run_all
from quire.kernels.triton.linear_kernels import add_splits, multiply_narrow
from quire.kernels.triton.sizes import power_of_two
from quire.kernels.triton.tiles import linear_tile

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST_RUN, _SMALLEST_RUN = 128, 32
_BLOCK = 1024
_NIBBLES = 16


@dataclass(frozen=True, slots=True)
class NarrowWeight:
    """A weight [O, K] as the kernel reads it; made by `pack_integers` and `pack_float8`.

    codes       [O, K] int8 or float8_e4m3fn; packed: [O, K / 2] u8, two columns a byte (multiply_narrow says which)
    scales      [ceil(O / scale_rows), K / group_size] f32
    offsets     [O, K / group_size] f32 or None
    group_size  columns that share a scale, scale_rows so many rows
    run         columns that are taken at once
    base        is added to every code of a packed weight
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    group_size: int
    scale_rows: int
    run: int
    base: int

    @property
    def is_packed(self) -> bool:
        """Whether a byte has two codes."""
        return self.codes.dtype == torch.uint8

    @property
    def shape(self) -> tuple[int, int]:
        """[O, K]"""
        return self.codes.shape[0], self.codes.shape[1] * (2 if self.is_packed else 1)


def pack_integers(codes: Tensor, scale: Tensor, offset: Tensor | None = None) -> NarrowWeight:
    """Return the weight scale[o, g] * codes[o, k] + offset[o, g], in 4 bits where all codes lie within 16 numbers.

    codes          [O, K] int8
    scale, offset  [O, G] f32, a multiple of 32 columns per group, or G = 1
    Raises InvariantError where groups are of another size.
    """
    num_rows, num_columns = codes.shape
    check_contiguous("codes", codes, (None, None), torch.int8)
    check_tensor("scale", scale, (num_rows, None), torch.float32)
    group_size = num_columns // scale.shape[1]
    run = _run_of(group_size, num_columns)
    scale = scale.contiguous()
    offset = None if offset is None else offset.contiguous()
    low = int(codes.min())
    if int(codes.max()) - low >= _NIBBLES or num_columns % run:
        return NarrowWeight(codes, scale, offset, group_size, 1, run, 0)
    # Symmetric codes keep a base that any x can be multiplied with; -8 serves most.
    base = -8 if low >= -8 and int(codes.max()) <= 7 else low
    nibbles = (codes.to(torch.int16) - base).to(torch.uint8).view(num_rows, -1, 2, run // 2)
    packed = (nibbles[:, :, 0] | nibbles[:, :, 1] << 4).reshape(num_rows, -1).contiguous()
    return NarrowWeight(packed, scale, offset, group_size, 1, run, base)


def pack_float8(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> NarrowWeight:
    """Return the weight of float8_e4m3fn [O, K] with a scale [ceil(O / block[0]), ceil(K / block[1])] f32 per block.

    block  (rows, columns); columns a multiple of 32 that divides K, or at least K: one scale for all columns
    Raises InvariantError for other blocks.
    """
    check_contiguous("weight", weight, (None, None), torch.float8_e4m3fn)
    num_rows, num_columns = weight.shape
    group_size = min(block[1], num_columns)
    check_contiguous("scale", scale, (-(-num_rows // block[0]), num_columns // group_size), torch.float32)
    return NarrowWeight(weight, scale, None, group_size, block[0], _run_of(group_size, num_columns), 0)


def multiply(x: Tensor, weight: NarrowWeight, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight^T (+ bias), summed in f32: the scales multiply sums of at most 128 products of x and the codes.

    x        [T, K] float, rows in one piece
    bias     [O] float
    Returns  [T, O] in x's dtype; a row depends on no other row
    """
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    run_all(multiply_launches(out, x, weight, bias))
    return out


def multiply_launches(out: Tensor, x: Tensor, weight: NarrowWeight, bias: Tensor | None = None) -> list[Launch]:
    """Return the launches of `multiply`, which write `out`."""
    num_rows, num_columns = weight.shape
    check_tensor("x", x, (None, num_columns), *_FLOATS)
    num_tokens = x.shape[0]
    check_contiguous("out", out, (num_tokens, num_rows), x.dtype)
    if bias is not None:
        check_contiguous("bias", bias, (num_rows,), *_FLOATS)
    tile = linear_tile(num_tokens, x.dtype)
    num_steps = -(-num_columns // weight.run)
    num_splits = _num_splits(-(-num_rows // tile.rows), num_steps)
    is_split = num_splits > 1
    parts = torch.empty(num_splits, *out.shape, dtype=torch.float32, device=x.device) if is_split else out
    arguments = {
        "x_ptr": x,
        "codes_ptr": weight.codes,
        "scales_ptr": weight.scales,
        "offsets_ptr": weight.offsets,
        "bias_ptr": None if is_split else bias,
        "out_ptr": parts,
        "x_stride": x.stride(0),
        "num_tokens": num_tokens,
    }
    constants = {
        "NUM_ROWS": num_rows,
        "NUM_COLUMNS": num_columns,
        "GROUP": weight.group_size,
        "SCALE_ROWS": weight.scale_rows,
        "IS_PACKED": weight.is_packed,
        "BASE": weight.base,
        "BLOCK_M": tile.tokens,
        "BLOCK_N": tile.rows,
        "BLOCK_K": weight.run,
        "STEPS": -(-num_steps // num_splits),
        "IS_SPLIT": is_split,
    }
    grid = (triton.cdiv(num_rows, tile.rows), triton.cdiv(num_tokens, tile.tokens), num_splits)
    launches = [Launch(multiply_narrow, grid, arguments, constants, tile.num_warps, tile.num_stages)]
    if is_split:
        arguments = {"parts_ptr": parts, "bias_ptr": bias, "out_ptr": out, "num_tokens": num_tokens}
        constants = {"NUM_ROWS": num_rows, "NUM_SPLITS": num_splits, "BLOCK": _BLOCK}
        launches.append(Launch(add_splits, (num_tokens, triton.cdiv(num_rows, _BLOCK)), arguments, constants, 4, 1))
    return launches


def _num_splits(num_programs: int, num_steps: int) -> int:
    """Return over how many programs a sum is split. By the shape of the weight alone, so that a row's bits are its own."""
    num_splits = 1
    while num_splits < 8 and num_splits * num_programs < 264 and num_steps >= 8 * num_splits:
        num_splits *= 2
    return num_splits


def _run_of(group_size: int, num_columns: int) -> int:
    if group_size == num_columns and group_size % _SMALLEST_RUN:
        return min(_LARGEST_RUN, power_of_two(num_columns, _SMALLEST_RUN))
    run = _LARGEST_RUN
    while run >= _SMALLEST_RUN and group_size % run:
        run //= 2
    if run < _SMALLEST_RUN or num_columns % group_size:
        raise InvariantError(
            f"columns share a scale in multiples of {_SMALLEST_RUN} that divide {num_columns}, got {group_size}"
        )
    return run
