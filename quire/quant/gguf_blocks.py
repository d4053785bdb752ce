"""Unpack the block types of GGUF files into QuantizedWeight or float tensors, exactly according to their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.base.gguf_file import BLOCK_SIZES, GgufTensor
from quire.quant.weight import QuantizedWeight

_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_E2M1_LEVELS = tuple(sorted(set(_E2M1_DOUBLED)))
_LEAST_DEVICE_GROUP = 32
_CHUNK_ELEMENTS = 1 << 22
"""Elements unpacked at once, which bounds the temporary memory."""

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@dataclass(frozen=True, slots=True)
class _Parts:
    """Contents of N blocks: codes [N, block] int8, scale and optionally offset [N, groups per block] f32."""

    codes: Tensor
    scale: Tensor
    offset: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _BlockType:
    """unpack: bytes [N, bytes per block] uint8 -> parts; levels as in QuantizedWeight; groups and offset as unpack returns."""

    unpack: Callable[[Tensor], _Parts]
    group_size: int = 32
    levels: tuple[int, ...] | None = None
    has_offset: bool = False


def unpack_blocks(type_name: str, packed: Tensor, name: str) -> QuantizedWeight:
    """Return the weight [O, K] of packed rows.

    type_name  an integer type with scales
    packed     [O, bytes per row] uint8; a row consists of whole blocks
    name       of the tensor, for errors. Raises ModelFormatError if a scale is not finite
    """
    block_type = _BLOCK_TYPES[type_name]
    block_elements, block_bytes = BLOCK_SIZES[type_name]
    num_rows, row_bytes = packed.shape
    num_columns = row_bytes // block_bytes * block_elements
    codes = torch.empty((num_rows, num_columns), dtype=torch.int8)
    scale = torch.empty((num_rows, num_columns // block_type.group_size))
    offset = torch.empty_like(scale) if block_type.has_offset else None
    step = max(1, _CHUNK_ELEMENTS // num_columns)
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        parts = block_type.unpack(packed[rows].reshape(-1, block_bytes))
        codes[rows] = parts.codes.view(-1, num_columns)
        scale[rows] = parts.scale.view(-1, scale.shape[1])
        if offset is not None and parts.offset is not None:
            offset[rows] = parts.offset.view(-1, scale.shape[1])
    if not all(bool(torch.isfinite(values).all()) for values in (scale, offset) if values is not None):
        raise ModelFormatError(f"tensor {name!r} ({type_name}) has scales that are not finite; get the file again")
    return QuantizedWeight(codes, scale, offset, block_type.levels)


def packed_bytes(tensors: Iterable[GgufTensor], float_bytes: int) -> int:
    """Return the size of tensors in the CPU kernels' layout, without row scales: codes with more than 16 levels take a byte,
    and every group has its scale and offset in float16.

    float_bytes  per value that is stored as a float
    """
    total = 0.0
    for tensor in tensors:
        block_type = _BLOCK_TYPES.get(tensor.type_name)
        if block_type is None:
            width = float(float_bytes)
        else:
            code = 1.0 if block_type.levels is None else 0.5
            width = code + (4 if block_type.has_offset else 2) / block_type.group_size
        total += math.prod(tensor.shape) * width
    return int(total)


def device_bytes(tensors: Iterable[GgufTensor], float_bytes: int) -> int:
    """Return the size of tensors in the GPU kernels' layout: codes with 16 consecutive levels or 4-bit floats take half a byte,
    and every group has its scale and offset in float32; groups below 32 columns are dequantised.

    float_bytes  per dense value
    """
    total = 0.0
    for tensor in tensors:
        block_type = _BLOCK_TYPES.get(tensor.type_name)
        if block_type is None or block_type.group_size < _LEAST_DEVICE_GROUP:
            width = float(float_bytes)
        else:
            levels = block_type.levels
            is_half = levels is not None and (levels[-1] - levels[0] < 16 or levels == _E2M1_LEVELS)
            width = (0.5 if is_half else 1.0) + (8 if block_type.has_offset else 4) / block_type.group_size
        total += math.prod(tensor.shape) * width
    return int(total)


def check_is_weight(type_name: str, name: str) -> None:
    """Raise UnsupportedError if a tensor's type is neither in FLOAT_TYPES nor supported here."""
    if type_name not in FLOAT_TYPES and type_name not in _BLOCK_TYPES:
        supported = ", ".join([*FLOAT_TYPES, *_BLOCK_TYPES])
        raise UnsupportedError(
            f"tensor {name!r} has type {type_name}, which is not supported for weights; supported: {supported}"
        )


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the f16 at byte `start` of each block, [N, 1] f32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _halves(packed: Tensor) -> Tensor:
    """Return nibbles as codes: all low ones of the last dimension, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _bits(packed: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Return [..., number of shifts, bytes]: (packed >> shift) & mask for each shift."""
    return torch.stack([(packed >> shift) & mask for shift in shifts], dim=-2)


def _signed(codes: Tensor, minus: int = 0) -> Tensor:
    """Return uint8 codes less `minus` as int8; the result is in range, so the wrap-around is correct."""
    return (codes - minus if minus else codes).view(torch.int8)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Return bit j of the u32 at byte `start` as 16 * bit, [N, 32]."""
    bits = torch.stack([(blocks[:, start : start + 4] >> shift) & 1 for shift in range(8)], dim=-1)
    return bits.view(-1, 32) << 4


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and 8 minima of 12 bytes, [N, 8] f32 each."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=1)
    return scales.float(), minima.float()


def _q4_0(blocks: Tensor) -> _Parts:
    return _Parts(_signed(_halves(blocks[:, 2:]), 8), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> _Parts:
    return _Parts(_signed(_halves(blocks[:, 4:])), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> _Parts:
    return _Parts(_signed(_halves(blocks[:, 6:]) | _fifth_bits(blocks, 2), 16), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> _Parts:
    codes = _halves(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _Parts(_signed(codes), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> _Parts:
    return _Parts(blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0))


def _two_bits(packed: Tensor) -> Tensor:
    """Return 256 codes of 64 bytes: each run of 32 bytes holds four runs of 32 codes, the lowest bits first."""
    return _bits(packed.reshape(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 256)


def _q2_k(blocks: Tensor) -> _Parts:
    scales = blocks[:, :16]
    codes = _signed(_two_bits(blocks[:, 16:80]))
    return _Parts(codes, _half(blocks, 80) * (scales & 15), -(_half(blocks, 82) * (scales >> 4)))


def _q3_k(blocks: Tensor) -> _Parts:
    packed = blocks[:, 96:108]
    low = _halves(packed[:, :8])
    high = _bits(packed[:, 8:], (0, 2, 4, 6), 3).reshape(-1, 16)
    scales = (low | (high << 4)).float() - 32
    is_high = _bits(blocks[:, :32], tuple(range(8)), 1).reshape(-1, 256)
    codes = _signed(_two_bits(blocks[:, 32:96]) | (is_high << 2), 4)
    return _Parts(codes, _half(blocks, 108) * scales)


def _q4_k(blocks: Tensor) -> _Parts:
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    codes = _bits(blocks[:, 16:].reshape(-1, 4, 32), (0, 4), 15).reshape(-1, 256)
    return _Parts(_signed(codes), _half(blocks, 0) * scales, -(_half(blocks, 2) * minima))


def _q5_k(blocks: Tensor) -> _Parts:
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    low = _bits(blocks[:, 48:].reshape(-1, 4, 32), (0, 4), 15).reshape(-1, 256)
    high = _bits(blocks[:, 16:48], tuple(range(8)), 1).reshape(-1, 256)
    return _Parts(_signed(low | (high << 4)), _half(blocks, 0) * scales, -(_half(blocks, 2) * minima))


def _q6_k(blocks: Tensor) -> _Parts:
    low = _bits(blocks[:, :128].reshape(-1, 2, 64), (0, 4), 15).reshape(-1, 256)
    high = _bits(blocks[:, 128:192].reshape(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 256)
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return _Parts(_signed(low | (high << 4), 32), _half(blocks, 208) * scales)


def _table(codes: Tensor, values: tuple[int, ...]) -> Tensor:
    """Return values[codes] as int8; bytes.translate is several times faster than indexing."""
    translation = bytes(value & 255 for value in values).ljust(256, b"\0")
    found = codes.contiguous().numpy().tobytes().translate(translation)
    return torch.frombuffer(bytearray(found), dtype=torch.int8).view(codes.shape)


def _iq4_nl(blocks: Tensor) -> _Parts:
    return _Parts(_table(_halves(blocks[:, 2:]), _IQ4_LEVELS), _half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> _Parts:
    high = torch.stack([(blocks[:, 2 + index // 4] >> (2 * (index % 4))) & 3 for index in range(8)], dim=1)
    low = _bits(blocks[:, 4:8], (0, 4), 15).transpose(1, 2).reshape(-1, 8)
    scales = (low | (high << 4)).float() - 32
    codes = _halves(blocks[:, 8:].reshape(-1, 8, 16)).view(-1, 256)
    return _Parts(_table(codes, _IQ4_LEVELS), _half(blocks, 0) * scales)


def _mxfp4(blocks: Tensor) -> _Parts:
    exponent = blocks[:, :1].int()
    # The codes are doubled values, so the scale is halved: 2 ** (exponent - 128).
    scale = torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64), exponent - 128)
    scale = torch.where(exponent == 255, torch.nan, scale).float()
    return _Parts(_table(_halves(blocks[:, 1:]), _E2M1_DOUBLED), scale)


_NIBBLE = tuple(range(16))
_BLOCK_TYPES: dict[str, _BlockType] = {
    "Q4_0": _BlockType(_q4_0, levels=tuple(range(-8, 8))),
    "Q4_1": _BlockType(_q4_1, levels=_NIBBLE, has_offset=True),
    "Q5_0": _BlockType(_q5_0),
    "Q5_1": _BlockType(_q5_1, has_offset=True),
    "Q8_0": _BlockType(_q8_0),
    "Q2_K": _BlockType(_q2_k, 16, levels=tuple(range(4)), has_offset=True),
    "Q3_K": _BlockType(_q3_k, 16, levels=tuple(range(-4, 4))),
    "Q4_K": _BlockType(_q4_k, levels=_NIBBLE, has_offset=True),
    "Q5_K": _BlockType(_q5_k, has_offset=True),
    "Q6_K": _BlockType(_q6_k, 16),
    "IQ4_NL": _BlockType(_iq4_nl, levels=_IQ4_LEVELS),
    "IQ4_XS": _BlockType(_iq4_xs, levels=_IQ4_LEVELS),
    "MXFP4": _BlockType(_mxfp4, levels=_E2M1_LEVELS),
}
