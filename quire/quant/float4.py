"""NVFP4 and MXFP4 in the compressed-tensors format: 4-bit floats (e2m1) with a scale per 16 or 32 columns.

Twice an e2m1 value is an integer, so the weights are exact as integer codes with half the scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.base.errors import ModelFormatError
from quire.quant.stored_parts import StoredParts
from quire.quant.weight import CodeForm, QuantizedWeight, StoredWeight

_HALVES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_LEVELS = tuple(sorted(set(_HALVES)))
_NVFP4_GROUP, _MXFP4_GROUP, _BITS = 16, 32, 4
_U8 = (torch.uint8,)
_F32 = (torch.float32,)


def read_nvfp4(parts: StoredParts) -> StoredWeight:
    """Return a weight with float8 scales that are divided by a global scale. Raises ModelFormatError."""
    num_rows, num_columns, num_groups = _sizes(parts, _NVFP4_GROUP)
    scale_dtypes, scale_shape = (torch.float8_e4m3fn,), (num_rows, num_groups)
    parts.take("weight_scale", scale_dtypes, scale_shape)
    parts.take("weight_global_scale", _F32, (1,), ())

    def load() -> QuantizedWeight:
        scale = parts.scale("weight_scale", parts.take("weight_scale", scale_dtypes, scale_shape))
        whole = parts.scale("weight_global_scale", parts.take("weight_global_scale", _F32, (1,), ()))
        if not bool((whole > 0).all()):
            raise parts.damaged("weight_global_scale", f"is {float(whole)}, expected a positive number")
        return unpack_float4(_octets(parts), scale / whole)

    return parts.integers((num_rows, num_columns), CodeForm.of(_BITS, _NVFP4_GROUP), load)


def read_mxfp4(parts: StoredParts) -> StoredWeight:
    """Return a weight with powers of two as scales. Raises ModelFormatError."""
    num_rows, num_columns, num_groups = _sizes(parts, _MXFP4_GROUP)
    scale_dtypes, scale_shape = (torch.uint8, torch.float8_e8m0fnu), (num_rows, num_groups)
    parts.take("weight_scale", scale_dtypes, scale_shape)

    def load() -> QuantizedWeight:
        stored = parts.take("weight_scale", scale_dtypes, scale_shape).view(torch.float8_e8m0fnu)
        return unpack_float4(_octets(parts), parts.scale("weight_scale", stored))

    return parts.integers((num_rows, num_columns), CodeForm.of(_BITS, _MXFP4_GROUP), load)


def read_paired_float4(parts: StoredParts, part: str) -> StoredWeight:
    """Return a weight [O, K] whose bytes [O, K / 2] int8 have two values, with the scales `part` [O, K / 32], powers of two."""
    num_rows, num_bytes = parts.take("weight", (torch.int8,), (None, None)).shape
    if not num_rows or not num_bytes:
        raise parts.wrong("weight", "with at least one row and column")
    num_groups = parts.num_groups(2 * num_bytes, _MXFP4_GROUP)
    dtypes, shape = (torch.float8_e8m0fnu, torch.float32), (num_rows, num_groups)
    parts.take(part, dtypes, shape)

    def load() -> QuantizedWeight:
        octets = parts.take("weight", (torch.int8,), (num_rows, num_bytes)).view(torch.uint8)
        return unpack_float4(octets, parts.scale(part, parts.take(part, dtypes, shape)))

    return parts.integers((num_rows, 2 * num_bytes), CodeForm.of(_BITS, _MXFP4_GROUP), load)


def _sizes(parts: StoredParts, group_size: int) -> tuple[int, int, int]:
    """Return O, K and the number of groups per row."""
    num_rows, num_bytes = parts.take("weight_packed", _U8, (None, None)).shape
    if not num_bytes or not num_rows:
        raise ModelFormatError(f"{parts.module}.weight_packed has no values: its shape is {[num_rows, num_bytes]}")
    return num_rows, 2 * num_bytes, parts.num_groups(2 * num_bytes, group_size)


def _octets(parts: StoredParts) -> Tensor:
    return parts.take("weight_packed", _U8, (None, None))


def unpack_float4(octets: Tensor, scale: Tensor) -> QuantizedWeight:
    """Return the weight of bytes [O, K / 2] u8 with a scale [O, G] f32; the low half of a byte is the first value."""
    table = torch.tensor(_HALVES, dtype=torch.int8)
    # Two values at once, with a table indexed by bytes whose entries are read as one int16.
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], 1).view(torch.int16).flatten()
    codes = pairs.index_select(0, octets.flatten().int()).view(torch.int8)
    return QuantizedWeight(codes.view(len(octets), -1), scale / 2, levels=_LEVELS)
