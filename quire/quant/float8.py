"""Float8Weight: a weight of float8_e4m3fn with scales, in the form in which GPUs run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.base.errors import InvariantError

LARGEST = 448.0
"""The largest finite value of float8_e4m3fn."""
_CHUNK_WEIGHTS = 1 << 24


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """A linear weight [O, K] as float8 codes with a scale for each block of rows and columns.

    The weight is scale[o // block[0], j // block[1]] * codes[o, j].

    codes  [O, K] float8_e4m3fn
    scale  [ceil(O / block[0]), ceil(K / block[1])] f32
    block  (rows, columns)
    """

    codes: Tensor
    scale: Tensor
    block: tuple[int, int]

    def __post_init__(self) -> None:
        (num_rows, num_columns), (high, wide) = self.codes.shape, self.block
        grid = (-(-num_rows // high), -(-num_columns // wide))
        if self.codes.dtype != torch.float8_e4m3fn or tuple(self.scale.shape) != grid:
            raise InvariantError(
                f"codes {tuple(self.codes.shape)} of {self.codes.dtype} and scales {tuple(self.scale.shape)} of blocks "
                f"{self.block} do not form a weight"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """[O, K]."""
        return (self.codes.shape[0], self.codes.shape[1])

    def rows(self, start: int, stop: int) -> Float8Weight:
        """Return the output rows [start, stop)."""
        high = self.block[0]
        if start % high:
            return self.by_row().rows(start, stop)
        return replace(self, codes=self.codes[start:stop], scale=self.scale[start // high : -(-stop // high)])

    def by_row(self) -> Float8Weight:
        """Return the same weight with separate scales for every row."""
        if self.block[0] == 1:
            return self
        rows = torch.arange(self.shape[0], device=self.scale.device) // self.block[0]
        return Float8Weight(self.codes, self.scale[rows], (1, self.block[1]))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [O, K], computed in f32."""
        weight, wide = self.codes.float(), self.block[1]
        scale = self.by_row().scale
        for index in range(scale.shape[1]):
            weight[:, index * wide : (index + 1) * wide] *= scale[:, index : index + 1]
        return weight.to(dtype)


def concatenate_float8(parts: Sequence[Float8Weight]) -> Float8Weight | None:
    """Return weights over one input, concatenated by rows, or None if their groups of columns differ.

    Scales are kept per block if the parts consist of whole blocks, and are expanded to rows otherwise.
    """
    num_columns = parts[0].shape[1]
    if len({min(part.block[1], num_columns) for part in parts}) > 1 or any(part.shape[1] != num_columns for part in parts):
        return None
    heights = {part.block[0] for part in parts}
    if len(parts) > 1 and (len(heights) > 1 or any(part.shape[0] % part.block[0] for part in parts[:-1])):
        parts = [part.by_row() for part in parts]
    # Viewed as bytes, because not every operation supports float8.
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return Float8Weight(
        codes, torch.cat([part.scale for part in parts]), (parts[0].block[0], min(parts[0].block[1], num_columns))
    )


def exact_quotient(x: Tensor, number: float) -> Tensor:
    """Return x / number with the same bits on every device.

    On CUDA, torch multiplies by the reciprocal of a number or a 0-dim CPU tensor, which may differ in the last bit; by a tensor
    on the device of x it divides.
    """
    return x / x.new_tensor([number])


def quantize_float8(weight: Tensor, rounded_to: torch.dtype | None = None) -> Float8Weight:
    """Return a weight [O, K] with a scale per row, which maps the largest magnitude to the largest float8 value.

    rounded_to  the weight is rounded to this dtype first

    A row with a non-finite weight has NaN as its scale, so that it shows in the results.
    """
    num_rows, num_columns = weight.shape
    codes = torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(num_rows, 1, device=weight.device)
    step = max(1, _CHUNK_WEIGHTS // max(1, num_columns))
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        x = weight[rows] if rounded_to is None else weight[rows].to(rounded_to)
        x = x.float()
        largest = x.abs().amax(1, keepdim=True)
        scale[rows] = torch.where(torch.isfinite(largest), exact_quotient(largest, LARGEST), torch.nan)
        divided = torch.nan_to_num(x / scale[rows], 0.0, LARGEST, -LARGEST).clamp(-LARGEST, LARGEST)
        codes[rows] = divided.to(torch.float8_e4m3fn)
    return Float8Weight(codes, scale, (1, num_columns))
