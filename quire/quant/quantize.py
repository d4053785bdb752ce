"""Quantise float weights: per row to int8, or in groups of columns to 16 levels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from quire.base.errors import ConfigError
from quire.quant.weight import QuantizedWeight

LINEAR_LEVELS = tuple(range(-8, 8))
NONLINEAR_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
AFFINE_LEVELS = tuple(range(16))
GROUP_SIZES = (32, 64, 128)
MIN_COLUMNS = 32
"""A weight with fewer columns stays float: its scales would take as much as they save."""

_CLIPS = (0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15)
_AFFINE_CLIPS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72)
_CHUNK_WEIGHTS = 1 << 18
"""Weights worked on at once: the working copies in f32 stay in the cache."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a weight is quantised. Raises ConfigError.

    kind        "int8": a scale per row; "linear": levels -8..7; "nonlinear": sixteen levels, closer together near zero;
                "affine": levels 0..15 with an offset per group
    group_size  columns that share a scale: 32, 64 or 128; of no meaning to int8
    """

    kind: Literal["int8", "linear", "nonlinear", "affine"]
    group_size: int = 32

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            raise ConfigError(f"group_size must be one of {GROUP_SIZES}, got {self.group_size!r}")

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of one weight, with its share of scales and offsets in float16 but not of the scale of its row."""
        if self.kind == "int8":
            return 1.0
        return 0.5 + (4 if self.kind == "affine" else 2) / self.group_size


INT8 = Scheme("int8")
INT4 = Scheme("nonlinear")
"""The best of 4.5 bits a weight: about 0.8 dB above linear levels, and 1.2 dB above affine ones in groups of 64."""


def fit_scheme(scheme: Scheme, num_columns: int) -> Scheme | None:
    """Return the scheme that a weight with this many columns gets.

    Groups that do not divide the columns become the largest of 32, 64 and 128 that do, and int8 where none does. None: the
    weight stays float, having fewer than MIN_COLUMNS columns.
    """
    if num_columns < MIN_COLUMNS:
        return None
    if scheme.kind == "int8" or num_columns % scheme.group_size == 0:
        return scheme
    fitting = [size for size in GROUP_SIZES if num_columns % size == 0]
    return replace(scheme, group_size=fitting[-1]) if fitting else INT8


def quantize_weight(weight: Tensor, scheme: Scheme, scale_dtype: torch.dtype | None = None) -> QuantizedWeight:
    """Return a weight quantised by a scheme that fits its columns; no calibration, deterministic.

    weight       [O, K] float, of any dtype
    scale_dtype  what the scales will be stored in; None: as the kernels hold them, see `round_scales`

    For each row (int8) or group (the others), with x its weights in f32:

    int8       scale = max|x| / 127, codes = round(x / scale), halves to even.
    linear and nonlinear, over ascending levels L
      1. extreme = the x of the largest magnitude, the first of equals.
      2. For each clip c of 0.8, 0.85, ... 1.15: l = nearest(x * (c * L[0] / extreme)); score = (sum x l)^2 / sum l^2. This
         is by how much the scale (sum x l) / (sum l^2), which fits l to x by least squares, reduces the squared error.
      3. The scale of the largest score, the first of equals, is rounded as it will be stored, and the codes are
         nearest(x / scale). The extreme may be of either sign, so a scale may be negative: it lies at L[0], which is the
         level farthest from zero.
    affine
      1. For each clip c of 1, 0.96, ... 0.72: q = round((x - low) / step) in 0..15, where the 16 steps have c times the
         range of x, in its middle; scale and offset are the line that fits q to x by least squares.
      2. Those of the smallest squared error are rounded as they will be stored, and the codes are round((x - offset) / scale).

    nearest(y) is the level after as many midpoints of neighbouring levels as are less than y. A scale of zero makes 1 / scale
    zero.
    """
    stop = weight.shape[0]
    num_rows = max(1, _CHUNK_WEIGHTS // weight.shape[1])
    parts = [_quantize_rows(weight[row : row + num_rows].float(), scheme, scale_dtype) for row in range(0, stop, num_rows)]
    codes, scales, offsets = zip(*parts, strict=True)
    levels = {"linear": LINEAR_LEVELS, "nonlinear": NONLINEAR_LEVELS, "affine": AFFINE_LEVELS}.get(scheme.kind)
    offset = torch.cat([part for part in offsets if part is not None]) if scheme.kind == "affine" else None
    return QuantizedWeight(torch.cat(codes), torch.cat(scales), offset, levels)


def round_scales(scale: Tensor) -> Tensor:
    """Return scales [O, G] as the kernels hold them: an f16 share of the largest magnitude of the row, times that in f32."""
    largest = scale.abs().amax(dim=1, keepdim=True)
    return (scale * _reciprocal(largest)).half().float() * largest


def sqnr_db(weight: Tensor, quantized: QuantizedWeight) -> float:
    """Return the ratio of signal to quantisation noise of a weight [O, K], in decibels; infinite where it is exact."""
    noise = signal = 0.0
    num_rows = max(1, _CHUNK_WEIGHTS // weight.shape[1])
    for row in range(0, weight.shape[0], num_rows):
        part = weight[row : row + num_rows].float()
        signal += float(part.square().sum())
        noise += float((part - quantized.rows(row, row + num_rows).dequantize()).square().sum())
    return 10 * math.log10(signal / noise) if noise else math.inf


def _quantize_rows(weight: Tensor, scheme: Scheme, scale_dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes, scale and offset of some rows."""
    num_rows, num_columns = weight.shape
    size = num_columns if scheme.kind == "int8" else scheme.group_size
    x = weight.view(num_rows, num_columns // size, size)
    if scheme.kind == "int8":
        scale = _round(x.abs().amax(dim=2) / 127, scale_dtype)
        codes, offset = (x * _reciprocal(scale)[:, :, None]).round().clamp(-127, 127), None
    elif scheme.kind == "affine":
        scale, offset = (_round(part, scale_dtype) for part in _search_affine(x))
        codes = ((x - offset[:, :, None]) * _reciprocal(scale)[:, :, None]).round().clamp(0, 15)
    else:
        levels = LINEAR_LEVELS if scheme.kind == "linear" else NONLINEAR_LEVELS
        table = _nearest_table(levels)
        scale, offset = _round(_search_scale(x, levels[0], table), scale_dtype), None
        codes = _nearest(x * _reciprocal(scale)[:, :, None], table)
    return codes.to(torch.int8).view(num_rows, num_columns), scale, offset


def _search_scale(x: Tensor, lowest: int, table: Tensor) -> Tensor:
    """Return the scale [O, G] of the groups x [O, G, size]; the lowest level is the farthest from zero."""
    extreme = x.gather(2, x.abs().argmax(dim=2, keepdim=True))
    unit = lowest * _reciprocal(extreme)
    best = torch.full(x.shape[:2], -1.0)
    scale = torch.zeros_like(best)
    for clip in _CLIPS:
        level = _nearest(x * (unit * clip), table)
        fit, power = (x * level).sum(dim=2), level.square().sum(dim=2)
        score = fit.square() * _reciprocal(power)
        is_better = score > best
        best = torch.where(is_better, score, best)
        scale = torch.where(is_better, fit * _reciprocal(power), scale)
    return scale


def _search_affine(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and offset [O, G] of the groups x [O, G, size]."""
    low, high = x.amin(dim=2, keepdim=True), x.amax(dim=2, keepdim=True)
    mean = x.mean(dim=2, keepdim=True)
    best = torch.full_like(low, math.inf)
    scale, offset = torch.zeros_like(low), mean
    for clip in _AFFINE_CLIPS:
        step = (high - low) * (clip / 15)
        start = (high + low) / 2 - 7.5 * step
        q = ((x - start) * _reciprocal(step)).round().clamp(0, 15)
        spread = q - q.mean(dim=2, keepdim=True)
        slope = (spread * (x - mean)).sum(dim=2, keepdim=True) * _reciprocal(spread.square().sum(dim=2, keepdim=True))
        base = mean - slope * q.mean(dim=2, keepdim=True)
        error = (x - base - slope * q).square().sum(dim=2, keepdim=True)
        is_better = error < best
        best = torch.where(is_better, error, best)
        scale, offset = torch.where(is_better, slope, scale), torch.where(is_better, base, offset)
    return scale.squeeze(2), offset.squeeze(2)


def _nearest_table(levels: tuple[int, ...]) -> Tensor:
    """Return the nearest level [512] f32 of y by ceil(2 * y) + 256: midpoints are halves of integers, so this is exact."""
    ordered = torch.tensor(levels, dtype=torch.float32)
    return ordered[torch.bucketize(torch.arange(-256, 256) / 2, (ordered[1:] + ordered[:-1]) / 2)]


def _nearest(y: Tensor, table: Tensor) -> Tensor:
    index = (y * 2).ceil_().clamp_(-256, 255).add_(256).int()
    return table.index_select(0, index.flatten()).view(y.shape)


def _reciprocal(y: Tensor) -> Tensor:
    return torch.where(y == 0, 0.0, 1 / y)


def _round(scale: Tensor, dtype: torch.dtype | None) -> Tensor:
    return round_scales(scale) if dtype is None else scale.to(dtype).float()
