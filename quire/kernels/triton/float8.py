"""Float8 linear layers: activations are quantised per token or per group of columns, for steps with many tokens.

Hopper's tensor cores multiply float8 twice as fast as bfloat16. Steps with fewer tokens are bound by reading weights, and not
quantised.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quire.base.errors import InvariantError
from quire.base.logging import get_logger
from quire.contracts.expert_options import float8_row_bytes
from quire.kernels.triton.device_traits import device_traits
from quire.kernels.triton.float8_kernels import multiply_quantized, quantize_rows
from quire.kernels.triton.launching import FLOATS, Launch, check_contiguous, check_tensor, run_all
from quire.kernels.triton.linear import add_splits_launch
from quire.kernels.triton.pdl import has_dependent_launch
from quire.kernels.triton.quantized_weights import DeviceQuantizedWeight
from quire.kernels.triton.sizes import power_of_two
from quire.kernels.triton.tiles import float8_tile

logger = get_logger(__name__)

FLOAT8_FROM = 33
"""Number of tokens from which inputs are quantised. With 64 tokens an H200 took 0.6 of the time that it took without."""

LIBRARY_FROM = 65
"""Number of tokens from which cuBLAS is faster than the kernel here, for scales per block of 128 x 128."""

_FLOAT8 = torch.float8_e4m3fn
_SCALED_MM_MAJORS = (9, 10)
_SCALED_MM_MULTIPLE = 16
_COLUMNS_OF_PROGRAM = 1024
_GROUPED = 8
_ROWS_AT_ONCE = 128
_BLOCK = 128
_MANY_PROGRAMS = 264
_F32_BYTES = 4


class Float8Rows(NamedTuple):
    """codes [T, K] float8_e4m3fn, whose rows are in one piece, and their scales [T, G] f32 with any strides, one per group of
    columns."""

    codes: Tensor
    scales: Tensor


def suits_float8(x: Tensor, weight: DeviceQuantizedWeight) -> bool:
    """Return whether `multiply_float8` is preferable: many tokens, not in f32, and a device that supports float8."""
    if weight.codes.dtype != _FLOAT8 or x.dtype == torch.float32 or len(x) < FLOAT8_FROM:
        return False
    return device_traits().has_float8


def multiply_float8(x: Tensor, weight: DeviceQuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight^T (+ bias), with x quantised to float8 with a scale per token and group of the weight's columns.

    x        [T, K] float, with contiguous rows
    weight   float8, see pack_float8
    bias     [O] float
    Returns  [T, O] in x's dtype, summed in f32; all NaN for a token with a NaN. The bits of a library call, and of a weight
             with few rows, may depend on the number of tokens
    """
    x = x if weight.columns is None else x.index_select(1, weight.columns)
    if _fits_library(x, weight):
        rows = quantize(x, weight.shape[1])
        # The library accepts row scales of x and of the weight as they are.
        scales = weight.scales.view(1, -1).expand(1, weight.shape[0]).contiguous()
        found = torch._scaled_mm(rows.codes, weight.codes.t(), rows.scales, scales, out_dtype=x.dtype)
        return found if bias is None else found.add_(bias)
    if _fits_block_library(x, weight):
        found = _multiply_blocks(x, weight)
        return found if bias is None else found.add_(bias)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    run_all(float8_launches(out, x, weight, bias))
    return out


def _fits_library(x: Tensor, weight: DeviceQuantizedWeight) -> bool:
    num_rows, num_columns = weight.shape
    has_row_scales = weight.group_size >= num_columns and (weight.scale_rows == 1 or weight.scale_rows >= num_rows)
    is_even = num_rows % _SCALED_MM_MULTIPLE == num_columns % _SCALED_MM_MULTIPLE == 0
    # "meta" stands for the device that kernels are compiled for.
    has_product = x.device.type in ("cuda", "meta") and device_traits().capability[0] in _SCALED_MM_MAJORS
    return has_product and x.dtype == torch.bfloat16 and has_row_scales and is_even


def _fits_block_library(x: Tensor, weight: DeviceQuantizedWeight) -> bool:
    num_rows, num_columns = weight.shape
    has_blocks = weight.group_size == weight.scale_rows == _BLOCK and num_rows % _BLOCK == num_columns % (4 * _BLOCK) == 0
    has_product = x.device.type in ("cuda", "meta") and device_traits().is_hopper
    is_many = x.dtype == torch.bfloat16 and len(x) >= LIBRARY_FROM
    return has_blocks and is_many and has_product and multiplies_blocks(x.device)


@cache
def multiplies_blocks(device: torch.device) -> bool:
    """Return whether torch's scaled product takes scales of 128 columns of tokens and of blocks of weights."""
    if device.type == "meta":  # so that what is compiled ahead is what the GPU will be asked for
        return torch.version.cuda is None or tuple(map(int, torch.version.cuda.split("."))) >= (12, 9)
    codes = torch.zeros(4 * _BLOCK, 4 * _BLOCK, dtype=_FLOAT8, device=device)
    token_scales, block_scales = torch.ones(4, 4 * _BLOCK, device=device), torch.ones(4, 4, device=device)
    try:
        torch._scaled_mm(codes, codes.t(), token_scales.t(), block_scales.t(), out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError) as error:  # of CUDA before 12.9
        logger.info("float8 weights in blocks are multiplied by quire's kernel, as torch does not: %s", error)
        return False
    return True


def _multiply_blocks(x: Tensor, weight: DeviceQuantizedWeight) -> Tensor:
    """Return x @ weight^T by torch's scaled product, with scales per block. The tokens are padded to whole tiles of it."""
    num_tokens, num_columns = x.shape
    padded = -(-num_tokens // _SCALED_MM_MULTIPLE) * _SCALED_MM_MULTIPLE
    codes = torch.empty(padded, num_columns, dtype=_FLOAT8, device=x.device)
    scales = torch.empty(num_columns // _BLOCK, padded, dtype=torch.float32, device=x.device).t()
    quantize_launch(Float8Rows(codes[:num_tokens], scales[:num_tokens]), x, _BLOCK).run()
    if x.device.type == "meta":
        return torch.empty(num_tokens, weight.shape[0], dtype=x.dtype, device=x.device)
    return torch._scaled_mm(codes, weight.codes.t(), scales, weight.scales.t(), out_dtype=x.dtype)[:num_tokens]


def quantize(x: Tensor, group_size: int) -> Float8Rows:
    """Return rows [T, K] quantised to float8, each group of `group_size` columns scaled by its maximum magnitude."""
    rows = _empty_rows(x, group_size)
    quantize_launch(rows, x, group_size).run()
    return rows


def quantize_launch(rows: Float8Rows, x: Tensor, group_size: int) -> Launch:
    """Return the launch of `quantize`, which writes `rows`."""
    check_tensor("x", x, (None, None), *FLOATS)
    num_tokens, num_columns = x.shape
    group_size = min(group_size, num_columns)
    num_groups = triton.cdiv(num_columns, group_size)
    check_tensor("codes", rows.codes, (num_tokens, num_columns), _FLOAT8)
    if rows.scales.shape != (num_tokens, num_groups) or rows.scales.dtype != torch.float32:
        raise InvariantError(
            f"scales must be [{num_tokens}, {num_groups}] f32, got {tuple(rows.scales.shape)} {rows.scales.dtype}"
        )
    width = power_of_two(group_size)
    height = max(1, min(_COLUMNS_OF_PROGRAM // width, power_of_two(num_groups)))
    arguments = {"x_ptr": x, "codes_ptr": rows.codes, "scales_ptr": rows.scales, "x_stride": x.stride(0)}
    arguments |= {"token_stride": rows.scales.stride(0), "group_stride": rows.scales.stride(1)}
    is_pdl = has_dependent_launch(x.device)
    constants = {"NUM_COLUMNS": num_columns, "ROW_CODES": rows.codes.stride(0), "GROUP": group_size}
    constants |= {"BLOCK_R": height, "BLOCK_C": width, "IS_PDL": is_pdl}
    num_warps = min(16, max(1, width * height // 512))
    grid = (num_tokens, triton.cdiv(num_groups, height))
    return Launch(quantize_rows, grid, arguments, constants, num_warps, 1, is_pdl=is_pdl)


def pack_rows_launch(x: Tensor, group_size: int) -> tuple[Launch, Tensor]:
    """Return the launch of `quantize` into one tensor, which ranks send at once, and that tensor.

    x        [T, K], K a multiple of 16
    Returns  [T, float8_row_bytes(K, group_size)] u8: the codes of a row, then its scales
    """
    num_tokens, num_columns = x.shape
    group_size = min(group_size, num_columns)
    end = num_columns + 4 * triton.cdiv(num_columns, group_size)
    packed = torch.empty(num_tokens, float8_row_bytes(num_columns, group_size), dtype=torch.uint8, device=x.device)
    rows = Float8Rows(packed[:, :num_columns].view(_FLOAT8), packed[:, num_columns:end].view(torch.float32))
    return quantize_launch(rows, x, group_size), packed


def float8_launches(out: Tensor, x: Tensor, weight: DeviceQuantizedWeight, bias: Tensor | None = None) -> list[Launch]:
    """Return the launches of `multiply_float8`, which write `out`; the columns of x are already in the stored order."""
    num_rows, num_columns = weight.shape
    num_tokens = x.shape[0]
    if weight.codes.dtype != _FLOAT8:
        raise InvariantError(f"float8 products take weights of {_FLOAT8}, got {weight.codes.dtype}")
    check_tensor("x", x, (None, num_columns), *FLOATS)
    check_contiguous("out", out, (num_tokens, num_rows), x.dtype)
    if bias is not None:
        check_contiguous("bias", bias, (num_rows,), *FLOATS)
    rows = _empty_rows(x, weight.group_size)
    tile = float8_tile(num_tokens)
    num_tiles = triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(num_rows, tile.rows)
    num_steps = triton.cdiv(num_columns, weight.run)
    num_splits = _num_splits(triton.cdiv(num_tokens, tile.tokens) * tile.tokens, weight.shape, num_steps, num_tiles)
    steps_of_part = triton.cdiv(num_steps, num_splits)
    parts = torch.empty(num_splits, *out.shape, dtype=torch.float32, device=out.device) if num_splits > 1 else out
    arguments = {
        "x_ptr": rows.codes,
        "x_scales_ptr": rows.scales,
        "codes_ptr": weight.codes,
        "scales_ptr": weight.scales,
        "bias_ptr": None if num_splits > 1 else bias,
        "out_ptr": parts,
        "num_tokens": num_tokens,
        "num_steps": steps_of_part,
    }
    rows_at_once = min(tile.rows, _ROWS_AT_ONCE)
    is_pdl = has_dependent_launch(x.device)
    constants = {
        "NUM_ROWS": num_rows,
        "NUM_COLUMNS": num_columns,
        "GROUP": weight.group_size,
        "SCALE_ROWS": weight.scale_rows,
        "BLOCK_M": tile.tokens,
        "BLOCK_N": rows_at_once,
        "BLOCK_K": weight.run,
        "PARTS": tile.rows // rows_at_once,
        "GROUPED": _GROUPED,
        "IS_WHOLE": num_columns == num_splits * steps_of_part * weight.run,
        "IS_SPLIT": num_splits > 1,
        "IS_PDL": is_pdl,
    }
    grid = (num_tiles, num_splits)
    product = Launch(multiply_quantized, grid, arguments, constants, tile.num_warps, tile.num_stages, is_pdl=is_pdl)
    added = [] if num_splits == 1 else [add_splits_launch(out, parts, bias)]
    return [quantize_launch(rows, x, weight.group_size), product, *added]


def _num_splits(num_tokens: int, shape: tuple[int, int], num_steps: int, num_tiles: int) -> int:
    """Return into how many parts sums are split, so that few tiles occupy all multiprocessors.

    Each part has at least eight steps, and the parts take at most half of the weight's traffic.

    num_tokens  of the tiles: between two powers of two there are two numbers of parts, both compiled ahead
    """
    num_rows, num_columns = shape
    count = 1
    while 2 * count * num_tiles <= _MANY_PROGRAMS and num_steps >= 16 * count:
        if 2 * count * num_tokens * num_rows * 2 * _F32_BYTES > num_rows * num_columns // 2:
            break
        count *= 2
    return count


def _empty_rows(x: Tensor, group_size: int) -> Float8Rows:
    num_tokens, num_columns = x.shape
    num_groups = triton.cdiv(num_columns, min(group_size, num_columns))
    scales = torch.empty(num_tokens, num_groups, dtype=torch.float32, device=x.device)
    return Float8Rows(torch.empty(num_tokens, num_columns, dtype=_FLOAT8, device=x.device), scales)
