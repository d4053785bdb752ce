"""Quantised formats of the KV cache: how a vector (one token and head of K or V) becomes codes and one scale, and back.

int8      code * scale, the scale being max |x| / 127
fp8       the same with codes of e4m3, whose largest is 448: the scale is max |x| / 448
rotated4  the vector is rotated by a fixed orthogonal matrix, which spreads outliers over all of its values; what it becomes is
          close to normally distributed. Each value is divided by the root mean square and rounded to one of sixteen levels. The
          scale is the one with the least squared error. After "TurboQuant" (https://arxiv.org/abs/2504.19874), without its
          second stage. A scale that keeps the vector's norm, or its inner product with itself, gave a higher perplexity

Rotations keep inner products, so attention rotates the queries in place of the keys, and the sum in place of the values.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from quire.contracts.kv_spec import KvDtype

KvCode = Literal["int8", "fp8", "rotated4"]

KV_CODES: dict[KvDtype, tuple[KvCode, KvCode]] = {
    "int8": ("int8", "int8"),
    "fp8": ("fp8", "fp8"),
    "turboquant_4bit": ("rotated4", "rotated4"),
    "k8v4": ("int8", "rotated4"),
}
"""The codes of K and V in each format of the CPU."""

_POSITIVE_LEVELS = [
    float(torch.tensor(0.23518 * level + 0.00218 * level**3).bfloat16()) for level in (0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5)
]
LEVELS: tuple[float, ...] = (*(-level for level in reversed(_POSITIVE_LEVELS)), *_POSITIVE_LEVELS)
"""Sixteen levels for a normal distribution, exact in bfloat16. Their mean squared error is 0.0097 (the least possible is
0.0095)."""
THRESHOLDS: tuple[float, ...] = tuple((low + high) / 2 for low, high in pairwise(LEVELS))
"""The code of a value is the number of thresholds below it."""


def rotation_signs(dim: int) -> Tensor:
    """Return the signs [dim] f32 of a rotation: the same in every process, as pages of the cache outlive processes."""
    bits = (torch.arange(1, dim + 1, dtype=torch.int64) * 0x9E3779B1) & 0xFFFFFFFF
    bits = ((bits ^ bits >> 15) * 0x85EBCA77) & 0xFFFFFFFF
    return 1.0 - 2.0 * (bits >> 31).float()


def rotate(x: Tensor) -> Tensor:
    """Return vectors [..., D] f32, rotated: signs, then a normalised Hadamard transform of each power of two that divides D."""
    return _hadamard(x * rotation_signs(x.shape[-1]))


def unrotate(x: Tensor) -> Tensor:
    """Return what `rotate` was called on, but for rounding."""
    return _hadamard(x) * rotation_signs(x.shape[-1])


def _hadamard(x: Tensor) -> Tensor:
    dim = x.shape[-1]
    block = dim & -dim
    x, half = x / math.sqrt(block), 1
    while half < block:
        low, high = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        half *= 2
    return x


def quantize(x: Tensor, code: KvCode) -> tuple[Tensor, Tensor]:
    """Return the codes [..., D] and the scales [...] f32 of vectors [..., D] f32: i8, float8_e4m3fn for "fp8", or u8 of
    0 to 15 for "rotated4".

    The scale of zeros is 0, that of a vector with a NaN or an infinity is not finite.
    """
    if code != "rotated4":
        largest = 127 if code == "int8" else 448
        scales = x.abs().amax(-1) / largest
        codes = (x / scales.where(scales > 0, torch.ones(()))[..., None]).nan_to_num(0).clamp(-largest, largest)
        return codes.round().to(torch.int8) if code == "int8" else codes.to(torch.float8_e4m3fn), scales
    highest = x.abs().amax(-1, keepdim=True)
    rotated = rotate(x / highest.where(highest > 0, torch.ones(())))
    squares = rotated.square().sum(-1, keepdim=True)
    normal = rotated * (x.shape[-1] / squares).sqrt().where(squares > 0, torch.zeros(()))
    codes = torch.bucketize(normal.contiguous(), torch.tensor(THRESHOLDS)).to(torch.uint8)
    levels = torch.tensor(LEVELS)[codes.long()]
    return codes, highest[..., 0] * ((rotated * levels).sum(-1) / levels.square().sum(-1))


def dequantize(codes: Tensor, scales: Tensor, code: KvCode) -> Tensor:
    """Return the vectors [..., D] f32 that codes and scales stand for."""
    if code != "rotated4":
        return codes.float() * scales[..., None]
    return unrotate(torch.tensor(LEVELS)[codes.long()] * scales[..., None])
