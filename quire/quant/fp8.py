"""Weights of float8_e4m3fn with multiplied scales: per tensor, row, group of columns, or block; DeepSeek-V4 has 4-bit floats
beside them."""

from __future__ import annotations

import torch

from quire.base.errors import ModelFormatError
from quire.quant.config import Fp8Config
from quire.quant.float4 import read_paired_float4
from quire.quant.float8 import Float8Weight
from quire.quant.stored_parts import FLOATS, StoredParts
from quire.quant.weight import StoredWeight

PARTS = ("weight_scale", "weight_scale_inv", "scale")
SCALES = (*FLOATS, torch.float8_e8m0fnu)
_FP8 = (torch.float8_e4m3fn,)
_NAN = 0x7F


def read_fp8(parts: StoredParts, config: Fp8Config) -> StoredWeight:
    """Return the weight of a module, which loads as a float tensor, or as it is stored. Raises ModelFormatError.

    The scales are `weight_scale_inv` (multiplied in spite of the name), `weight_scale`, or `scale` (DeepSeek-V4), whose weights
    of int8 are 4-bit floats.
    """
    there = [part for part in PARTS if part in parts]
    if len(there) > 1:
        raise ModelFormatError(f"{parts.module} has both {there[1]} and {there[0]}; expected one of them")
    part = there[0] if there else "weight_scale"
    if part == "scale" and parts.dtype("weight") == torch.int8:
        return read_paired_float4(parts, part)
    num_rows, num_columns = parts.take("weight", _FP8, (None, None)).shape
    if config.block is not None:
        return read_fp8_blocks(parts, part, config.block)
    scale = parts.take(part, SCALES, (), (1,), (1, 1), (num_rows, 1), (num_rows,))
    return read_fp8_blocks(parts, part, (num_rows if scale.numel() == 1 else 1, num_columns))


def read_fp8_blocks(parts: StoredParts, part: str, block: tuple[int, int]) -> StoredWeight:
    """Return a weight whose scales `part` are a grid [ceil(O / block[0]), ceil(K / block[1])]; a single value may be []."""
    num_rows, num_columns = parts.take("weight", _FP8, (None, None)).shape
    if not num_rows or not num_columns:
        raise parts.wrong("weight", "with at least one row and column")
    grid = (-(-num_rows // block[0]), -(-num_columns // block[1]))
    shapes = [grid] + ([()] if grid == (1, 1) else []) + ([(grid[0],)] if grid[1] == 1 else [])
    parts.take(part, SCALES, *shapes)

    def load() -> Float8Weight:
        codes = parts.take("weight", _FP8, (num_rows, num_columns))
        if bool(((codes.view(torch.uint8) & _NAN) == _NAN).any()):
            raise parts.damaged("weight", "holds codes that are not numbers")
        return Float8Weight(codes, parts.scale(part, parts.take(part, SCALES, *shapes)).view(grid), block)

    return parts.float8((num_rows, num_columns), min(block[1], num_columns), load)
