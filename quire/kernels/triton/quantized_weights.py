"""DeviceQuantizedWeight: 4- or 8-bit integers or floats with scales, in the layout of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.kernels.triton.device_traits import device_traits
from quire.kernels.triton.launching import check_contiguous, check_tensor
from quire.kernels.triton.sizes import power_of_two

_LARGEST_RUN, _SMALLEST_RUN = 128, 32
_NIBBLES = 16
_FLOAT4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)

FLOAT4_LEVELS = tuple(sorted({sign * number for number in _FLOAT4_DOUBLED for sign in (1, -1)}))
"""Twice the values of a 4-bit float (e2m1), which are integers."""


@dataclass(frozen=True, slots=True)
class DeviceQuantizedWeight:
    """A weight [O, K] in the kernels' layout; created by `pack_integers`, `pack_float4` and `pack_float8`.

    codes       [O, K] int8 or float8_e4m3fn; packed: [O, K / 2] u8, two columns per byte (see multiply_packed)
    scales      [ceil(O / scale_rows), ceil(K / group_size)] f32
    offsets     [O, K / group_size] f32 or None
    group_size  number of columns that share a scale; scale_rows: number of rows
    run         columns processed at once
    base        added to every code of a packed weight; None: its codes are floats (e2m1), doubled
    columns     [K] i64 or None: stored column j multiplies column columns[j] of the inputs
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    group_size: int
    scale_rows: int
    run: int
    base: int | None
    columns: Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Whether a byte has two codes."""
        return self.codes.dtype == torch.uint8

    @property
    def readable_codes(self) -> Tensor:
        """The codes as kernels read them: of float8 the bytes where the GPU does not convert it (`widened`)."""
        is_read_as_bytes = self.codes.dtype == torch.float8_e4m3fn and not device_traits().has_float8
        return self.codes.view(torch.uint8) if is_read_as_bytes else self.codes

    @property
    def shape(self) -> tuple[int, int]:
        """[O, K]."""
        return self.codes.shape[0], self.codes.shape[1] * (2 if self.is_packed else 1)

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        tensors = (self.codes, self.scales, self.offsets, self.columns)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def by_row(self) -> DeviceQuantizedWeight:
        """Return the same weight with separate scales for every row."""
        if self.scale_rows == 1:
            return self
        rows = torch.arange(self.shape[0], device=self.scales.device) // self.scale_rows
        return replace(self, scales=self.scales[rows], scale_rows=1)


def pack_integers(
    codes: Tensor, scale: Tensor, offset: Tensor | None = None, limits: tuple[int, int] | None = None
) -> DeviceQuantizedWeight:
    """Return the weight scale[o, g] * codes[o, k] + offset[o, g], in 4 bits if all codes lie within a range of 16 integers.

    codes          [O, K] int8
    scale, offset  [O, G] f32, a multiple of 32 columns per group, or G = 1
    limits         the minimum and maximum possible code; None: those of `codes`

    Raises InvariantError for other group sizes.
    """
    num_rows, num_columns = codes.shape
    check_contiguous("codes", codes, (None, None), torch.int8)
    check_tensor("scale", scale, (num_rows, None), torch.float32)
    group_size = num_columns // scale.shape[1]
    run = _run_of(group_size, num_columns)
    if num_columns % group_size:
        raise InvariantError(f"groups of {group_size} columns do not divide {num_columns}")
    scale = scale.contiguous()
    offset = None if offset is None else offset.contiguous()
    low, high = (int(codes.min()), int(codes.max())) if limits is None else limits
    if high - low >= _NIBBLES or num_columns % run:
        return DeviceQuantizedWeight(codes, scale, offset, group_size, 1, run, 0)
    # Symmetric codes keep a base with which any x can be multiplied; -8 fits most.
    base = -8 if low >= -8 and high <= 7 else low
    return DeviceQuantizedWeight(_packed((codes - base).view(torch.uint8), run), scale, offset, group_size, 1, run, base)


def pack_float4(codes: Tensor, scale: Tensor) -> DeviceQuantizedWeight:
    """Return the weight scale[o, g] * codes[o, k], in 4 bits if K consists of whole runs; codes are of FLOAT4_LEVELS.

    codes, scale  as in pack_integers, which also lists the errors
    """
    num_rows, num_columns = codes.shape
    check_contiguous("codes", codes, (None, None), torch.int8)
    check_tensor("scale", scale, (num_rows, None), torch.float32)
    group_size = num_columns // scale.shape[1]
    run = _run_of(group_size, num_columns)
    if num_columns % run or num_columns % group_size:
        return pack_integers(codes, scale, limits=(FLOAT4_LEVELS[0], FLOAT4_LEVELS[-1]))
    # The float code of a magnitude is its rank, the number of smaller magnitudes.
    sizes = codes.abs()
    floats = (codes < 0).to(torch.uint8) << 3
    for smaller in _FLOAT4_DOUBLED[:-1]:
        floats += sizes > smaller
    return DeviceQuantizedWeight(_packed(floats, run), scale.contiguous(), None, group_size, 1, run, None)


def _packed(nibbles: Tensor, run: int) -> Tensor:
    """Return [O, K / 2] of codes [O, K] u8 below 16: the first half of each run of columns in the low bits."""
    halves = nibbles.view(len(nibbles), -1, 2, run // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(nibbles), -1).contiguous()


def pack_float8(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> DeviceQuantizedWeight:
    """Return the weight of float8_e4m3fn [O, K] with a scale [ceil(O / block[0]), ceil(K / block[1])] f32 per block.

    block  (rows, columns); columns a multiple of 32, or at least K: one scale for all columns

    Raises InvariantError for other blocks.
    """
    check_contiguous("weight", weight, (None, None), torch.float8_e4m3fn)
    num_rows, num_columns = weight.shape
    group_size = min(block[1], num_columns)
    check_contiguous("scale", scale, (-(-num_rows // block[0]), -(-num_columns // group_size)), torch.float32)
    return DeviceQuantizedWeight(weight, scale, None, group_size, block[0], _run_of(group_size, num_columns), 0)


def fits_kernels(group_size: int, num_columns: int) -> bool:
    """Return whether the kernels support a weight with this many columns per scale."""
    return group_size >= num_columns or group_size % _SMALLEST_RUN == 0


def join_rows(parts: Sequence[DeviceQuantizedWeight]) -> DeviceQuantizedWeight | None:
    """Return weights over one input as one, with concatenated rows; None if they are of different kinds."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        is_like = (part.codes.dtype, part.shape[1], part.group_size, part.run, part.base) == (
            first.codes.dtype,
            first.shape[1],
            first.group_size,
            first.run,
            first.base,
        )
        if not is_like or (part.columns is None) != (first.columns is None):
            return None
        if part.columns is not None and first.columns is not None and not _are_equal(part.columns, first.columns):
            return None
    if len({part.scale_rows for part in parts}) > 1 or any(part.shape[0] % part.scale_rows for part in parts[:-1]):
        parts = [part.by_row() for part in parts]
    offsets = None
    if any(part.offsets is not None for part in parts):
        parts = [part.by_row() for part in parts]
        offsets = torch.cat([torch.zeros_like(part.scales) if part.offsets is None else part.offsets for part in parts])
    # Viewed as bytes, because not every operation supports float8.
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(first.codes.dtype)
    scales = torch.cat([part.scales for part in parts])
    return replace(first, codes=codes, scales=scales, offsets=offsets, scale_rows=parts[0].scale_rows)


def _are_equal(some: Tensor, others: Tensor) -> bool:
    return some is others or (not some.is_meta and torch.equal(some, others))


def _run_of(group_size: int, num_columns: int) -> int:
    if group_size == num_columns and group_size % _SMALLEST_RUN:
        return min(_LARGEST_RUN, power_of_two(num_columns, _SMALLEST_RUN))
    run = _LARGEST_RUN
    while run >= _SMALLEST_RUN and group_size % run:
        run //= 2
    if run < _SMALLEST_RUN:
        raise InvariantError(f"columns share a scale in multiples of {_SMALLEST_RUN}, got {group_size} of {num_columns}")
    return run
