"""Quantise float weights: per row to int8, or in groups of columns to 16 levels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from quire.base.errors import ConfigError
from quire.kernels.cpu.pages import SpentPages
from quire.kernels.cpu.quantization import NativeQuantizer
from quire.kernels.native import load_native
from quire.quant.float8 import exact_quotient
from quire.quant.weight import QuantizedWeight

LINEAR_LEVELS = tuple(range(-8, 8))
NONLINEAR_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
AFFINE_LEVELS = tuple(range(16))
_LEVELS = {"linear": LINEAR_LEVELS, "nonlinear": NONLINEAR_LEVELS, "affine": AFFINE_LEVELS}
GROUP_SIZES = (32, 64, 128)
MIN_COLUMNS = 32
"""A weight with fewer columns stays float: its scales would need as much memory as is saved."""

_CLIPS = (0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15)
_AFFINE_CLIPS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72)
_CHUNK_WEIGHTS = 1 << 18
"""Weights processed at once: the f32 copies stay in the cache."""
_DEVICE_CHUNK_WEIGHTS = 1 << 24
"""The same on a GPU, where a launch takes as long as this much arithmetic."""
_NATIVE_CHUNK_WEIGHTS = 1 << 24
"""The same for the native kernels, which make no copies. Each chunk synchronises all threads twice."""
_ROUNDED_CHUNK_WEIGHTS = 1 << 22
"""The same if each chunk is rounded to another dtype first."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a weight is quantised. Raises ConfigError.

    kind        "int8": a scale per row; "linear": levels -8..7; "nonlinear": sixteen levels, denser near zero;
                "affine": levels 0..15 with an offset per group; "float8": a scale per row, see float8.quantize_float8
    group_size  columns that share a scale: 32, 64 or 128; ignored by int8 and float8
    """

    kind: Literal["int8", "linear", "nonlinear", "affine", "float8"]
    group_size: int = 32

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            raise ConfigError(f"group_size must be one of {GROUP_SIZES}, got {self.group_size!r}")

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of one weight, with its share of scales and offsets in float16 but not of the scale of its row."""
        if self.kind in ("int8", "float8"):
            return 1.0
        return 0.5 + (4 if self.kind == "affine" else 2) / self.group_size


INT8 = Scheme("int8")
FLOAT8 = Scheme("float8")
FINE_INT4 = Scheme("nonlinear", 32)
"""The best at 4.5 bits per weight: about 0.8 dB better than linear levels, and 1.2 dB better than affine ones in groups of
64."""
INT4 = Scheme("nonlinear", 128)
"""4.125 bits per weight, and half as many sums to scale as with groups of 64; 1.4 dB worse than FINE_INT4."""


def fit_scheme(scheme: Scheme, num_columns: int) -> Scheme | None:
    """Return the scheme for a weight with this many columns.

    Groups that do not divide the columns are replaced by the largest of 32, 64 and 128 that does, or by int8 if none does.
    None: the weight stays float, because it has fewer than MIN_COLUMNS columns.
    """
    if num_columns < MIN_COLUMNS:
        return None
    if scheme.kind in ("int8", "float8") or num_columns % scheme.group_size == 0:
        return scheme
    fitting = [size for size in GROUP_SIZES if num_columns % size == 0]
    return replace(scheme, group_size=fitting[-1]) if fitting else INT8


def quantize_weight(
    weight: Tensor,
    scheme: Scheme,
    scale_dtype: torch.dtype | None = None,
    is_forgotten: bool = False,
    rounded_to: torch.dtype | None = None,
) -> QuantizedWeight:
    """Return a weight quantised to integers by a scheme that fits its columns; deterministic, without calibration.

    weight       [O, K] float, of any dtype
    scale_dtype  dtype in which the scales will be stored; None: as the kernels hold them, see `round_scales`
    is_forgotten the weight comes from a checkpoint's loader and will not be read soon: pages of a mapped file are released
    rounded_to   the weight is rounded to this dtype first, some rows at a time

    For each row (int8) or group (the others), x are its weights in f32, multiplied by the power of two that brings the largest
    magnitude into [1, 2), so that no square leaves the range of f32:

    int8       scale = max|x| / 127, codes = round(x / scale), halves to even.

    linear and nonlinear, over ascending levels L
      1. extreme = the x of the largest magnitude, the first of equals.
      2. For each clip c of 0.8, 0.85, ... 1.15: l = nearest(x * (c * L[0] / extreme)); score = (sum x l)^2 / sum l^2. This
         is how much the scale (sum x l) / (sum l^2), the least-squares fit of l to x, reduces the squared error.
      3. The scale of the largest score, the first of equals, is rounded to its stored precision, and the codes are
         nearest(x / scale). The extreme may have either sign, so a scale may be negative: the extreme is mapped near L[0],
         the level with the largest magnitude.

    affine
      1. For each clip c of 1, 0.96, ... 0.72: q = round((x - low) / step) in 0..15, where the 16 steps cover c times the
         range of x, centred; scale and offset are the least-squares line from q to x.
      2. Those of the smallest squared error are rounded to their stored precision, and the codes are
         round((x - offset) / scale).

    nearest(y) is the level whose index is the number of midpoints of adjacent levels that are less than y. A scale of zero has
    the codes of zeros. Sums over a group add its halves, then the halves of that, and so on. A group with a non-finite weight
    has NaN as its scale (and, through round_scales, its row), and the codes of zeros, so that it shows in the results.

    The native kernels give the same bits; torch is used where they are absent or no faster, and off the CPU.
    """
    num_rows, num_columns = weight.shape
    size = num_columns if scheme.kind == "int8" else scheme.group_size
    scale = torch.empty(num_rows, num_columns // size, device=weight.device)
    offset = torch.empty_like(scale) if scheme.kind == "affine" else None
    codes = torch.empty(num_rows, num_columns, dtype=torch.int8, device=weight.device)
    search, encode, num_at_once = _functions_for(scheme, weight.device.type == "cpu", is_forgotten)
    is_rounded = rounded_to is not None and rounded_to != weight.dtype
    step = max(1, (min(num_at_once, _ROUNDED_CHUNK_WEIGHTS) if is_rounded else num_at_once) // num_columns)
    spent = SpentPages()
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        x = weight[rows] if rounded_to is None else weight[rows].to(rounded_to)
        values = search(x)
        scale[rows] = _round(values[0], scale_dtype)
        if offset is not None:
            offset[rows] = _round(values[1], scale_dtype)
        encode(x, scale[rows], None if offset is None else offset[rows], codes[rows])
        if is_forgotten and is_rounded:
            spent.add((weight[rows],))
    return QuantizedWeight(codes, scale, offset, None if scheme.kind == "int8" else _LEVELS[scheme.kind])


def _functions_for(
    scheme: Scheme, is_cpu: bool, is_forgotten: bool
) -> tuple[Callable[[Tensor], Sequence[Tensor]], Callable[..., None], int]:
    """Return what finds the scales, what encodes by them, and how many weights both take at once."""
    native = load_native() if is_cpu else None
    # Torch is vectorised where the portable kernels are not.
    if native is None or native.isa() == "portable":
        return partial(search_scales, scheme), partial(_encode, scheme), _CHUNK_WEIGHTS if is_cpu else _DEVICE_CHUNK_WEIGHTS
    quantizer = native_quantizer(native, scheme)
    return quantizer.search, partial(quantizer.encode, is_forgotten=is_forgotten), _NATIVE_CHUNK_WEIGHTS


def round_scales(scale: Tensor) -> Tensor:
    """Return scales [O, G] as the kernels hold them: an f16 fraction of the row's largest magnitude, times that in f32."""
    largest = scale.abs().amax(dim=1, keepdim=True)
    return torch.where(largest == 0, scale, scale / largest).half().float() * largest


def sqnr_db(weight: Tensor, quantized: QuantizedWeight) -> float:
    """Return the signal-to-quantisation-noise ratio of a weight [O, K], in decibels; infinite if it is exact."""
    noise = signal = 0.0
    num_rows = max(1, _CHUNK_WEIGHTS // weight.shape[1])
    for row in range(0, weight.shape[0], num_rows):
        part = weight[row : row + num_rows].float()
        signal += float(part.square().sum())
        noise += float((part - quantized.rows(row, row + num_rows).dequantize()).square().sum())
    return 10 * math.log10(signal / noise) if noise else math.inf


def search_scales(scheme: Scheme, weight: Tensor) -> tuple[Tensor, ...]:
    """Return the scales [O, G] of some rows before rounding and, if affine, the offsets."""
    x = _grouped(weight, scheme)
    magnitude = x.abs().amax(dim=2)
    is_finite = torch.isfinite(magnitude)
    if scheme.kind == "int8":
        return (torch.where(is_finite, exact_quotient(magnitude, 127), math.nan),)
    power, back = (part[:, :, None] for part in _unit_powers(magnitude))
    x = torch.where(is_finite[:, :, None], x, 0.0) * power
    if scheme.kind == "affine":
        found = _search_affine(x)
    else:
        levels = _LEVELS[scheme.kind]
        found = (_search_scale(x, levels[0], nearest_table(levels)),)
    return tuple(torch.where(is_finite, part * back.squeeze(2), math.nan) for part in found)


def _encode(scheme: Scheme, weight: Tensor, scale: Tensor, offset: Tensor | None, codes: Tensor) -> None:
    """Write the codes [O, K] of some rows from their scales and offsets [O, G]."""
    power, _ = _unit_powers(scale.abs())
    x, has_scale = _grouped(weight, scheme), torch.isfinite(scale) & (scale != 0)
    if offset is not None:
        x = x - offset[:, :, None]
        has_scale &= torch.isfinite(offset)
    y = torch.where(has_scale[:, :, None], x * power[:, :, None] * _reciprocal(scale * power)[:, :, None], 0.0)
    if scheme.kind == "int8":
        y = y.round().clamp(-127, 127)
    elif scheme.kind == "affine":
        y = y.round().clamp(0, 15)
    else:
        y = _nearest(y, nearest_table(_LEVELS[scheme.kind]))
    codes.copy_(y.view(codes.shape))


def native_quantizer(native: ModuleType, scheme: Scheme, isa: str = "") -> NativeQuantizer:
    """Return the native kernels of a scheme, for one instruction set or the best one."""
    levels = _LEVELS.get(scheme.kind, (0,))
    clips = [clip / 15 for clip in _AFFINE_CLIPS] if scheme.kind == "affine" else list(_CLIPS)
    table = nearest_table(levels) if scheme.kind == "nonlinear" else None
    return NativeQuantizer(native, scheme.kind, scheme.group_size, torch.tensor(clips), levels[0], table, isa)


def _grouped(weight: Tensor, scheme: Scheme) -> Tensor:
    """Return rows [O, K] as [O, G, size] f32."""
    size = weight.shape[1] if scheme.kind == "int8" else scheme.group_size
    return weight.float().reshape(len(weight), -1, size)


def _unit_powers(magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Return the powers of two that bring magnitudes into [1, 2), or near it at both ends of the range, and their inverses."""
    exponent = (magnitude.view(torch.int32) >> 23).clamp(1, 253)
    return ((254 - exponent) << 23).view(torch.float32), (exponent << 23).view(torch.float32)


def _sum(x: Tensor) -> Tensor:
    """Return the sums [O, G, 1] over groups [O, G, size] in the order that `quantize_weight` defines."""
    while x.shape[2] > 1:
        half = x.shape[2] // 2
        x = x[:, :, :half] + x[:, :, half:]
    return x


def _search_scale(x: Tensor, lowest: int, table: Tensor) -> Tensor:
    """Return the scale [O, G] of the groups x [O, G, size]; the lowest level has the largest magnitude."""
    extreme = x.gather(2, x.abs().argmax(dim=2, keepdim=True))
    unit = lowest * _reciprocal(extreme)
    best = torch.full_like(extreme, -1.0)
    scale = torch.zeros_like(best)
    for clip in _CLIPS:
        level = _nearest(x * (unit * clip), table)
        fit, inverse = _sum(x * level), _reciprocal(level.square().sum(dim=2, keepdim=True))
        score = fit.square() * inverse
        is_better = score > best
        best = torch.where(is_better, score, best)
        scale = torch.where(is_better, fit * inverse, scale)
    return scale.squeeze(2)


def _search_affine(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and offset [O, G] of the groups x [O, G, size]."""
    low, high = x.amin(dim=2, keepdim=True), x.amax(dim=2, keepdim=True)
    size = x.shape[2]
    mean = _sum(x) / size
    best = torch.full_like(low, math.inf)
    scale, offset = torch.zeros_like(low), mean
    for clip in _AFFINE_CLIPS:
        step = (high - low) * (clip / 15)
        start = (high + low) / 2 - 7.5 * step
        q = ((x - start) * _reciprocal(step)).round().clamp(0, 15)
        middle = _sum(q) / size
        spread = q - middle
        slope = _sum(spread * (x - mean)) * _reciprocal(_sum(spread.square()))
        base = mean - slope * middle
        error = _sum((x - base - slope * q).square())
        is_better = error < best
        best = torch.where(is_better, error, best)
        scale, offset = torch.where(is_better, slope, scale), torch.where(is_better, base, offset)
    return scale.squeeze(2), offset.squeeze(2)


def nearest_table(levels: tuple[int, ...]) -> Tensor:
    """Return the nearest level [512] f32 of y at index ceil(2 * y) + 256: midpoints are halves of integers, so this is
    exact."""
    ordered = torch.tensor(levels, dtype=torch.float32)
    return ordered[torch.bucketize(torch.arange(-256, 256) / 2, (ordered[1:] + ordered[:-1]) / 2)]


def _nearest(y: Tensor, table: Tensor) -> Tensor:
    index = (y * 2).ceil_().clamp_(-256, 255).add_(256).int()
    return table.to(y.device).index_select(0, index.flatten()).view(y.shape)


def _reciprocal(y: Tensor) -> Tensor:
    return torch.where(y == 0, 0.0, 1 / y)


def _round(scale: Tensor, dtype: torch.dtype | None) -> Tensor:
    return round_scales(scale) if dtype is None else scale.to(dtype).float()
