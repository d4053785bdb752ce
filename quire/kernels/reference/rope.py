"""Rotary position embeddings (Su et al., 2021) with all common scaling methods."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.contracts.model_spec import QueryScaling, RopeSpec


def inverse_frequencies(spec: RopeSpec, max_model_len: int) -> Tensor:
    """Return the angle per position of each pair, [dim / 2] f32.

    max_model_len  determines "dynamic" and "longrope", which depend on a length. The short variant of longrope is that of
                   max_model_len = original_max; see ModelSpec.rope_switch_len
    """
    exponent = torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim
    base = 1.0 / spec.theta**exponent
    if spec.kind == "linear":
        return base / spec.factor
    if spec.kind == "proportional":
        return torch.where(torch.arange(spec.dim // 2) < spec.num_pairs, base, 0.0) / spec.factor
    if spec.kind == "dynamic":
        return _dynamic(spec, exponent, max_model_len)
    if spec.kind == "llama3":
        return _llama3(spec, base)
    if spec.kind == "yarn":
        return _yarn(spec, base)
    if spec.kind == "longrope":
        divisors = spec.long if max_model_len > spec.original_max else spec.short
        return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * spec.theta**exponent)
    return base


def _dynamic(spec: RopeSpec, exponent: Tensor, max_model_len: int) -> Tensor:
    length = max(max_model_len, spec.original_max)
    stretch = (spec.factor * length / spec.original_max) - (spec.factor - 1)
    theta = spec.theta * stretch ** (spec.dim / (spec.dim - 2))
    return 1.0 / theta**exponent


def _llama3(spec: RopeSpec, base: Tensor) -> Tensor:
    wavelength = 2 * math.pi / base
    smooth = (spec.original_max / wavelength - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1 - smooth) * base / spec.factor + smooth * base
    is_long = wavelength > spec.original_max / spec.low_freq_factor
    is_short = wavelength < spec.original_max / spec.high_freq_factor
    return torch.where(is_long, base / spec.factor, torch.where(is_short, base, blended))


def _yarn(spec: RopeSpec, base: Tensor) -> Tensor:
    def correction(rotations: float) -> float:
        return spec.dim * math.log(spec.original_max / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = correction(spec.beta_fast), correction(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return base / spec.factor * ramp + base * (1 - ramp)


def cos_sin(spec: RopeSpec, frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles at `positions` [T], each [T, 1, dim / 2], in the dtype they are used in."""
    angles = positions[:, None].float() * frequencies
    out = torch.float32 if spec.is_f32 else dtype
    cos, sin = angles.cos() * spec.attention_factor, angles.sin() * spec.attention_factor
    if spec.is_table_rounded:
        cos, sin = cos.to(dtype), sin.to(dtype)
    return cos.to(out)[:, None, :], sin.to(out)[:, None, :]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool = False) -> Tensor:
    """Rotate the first dims of each head of x [T, H, D] by the angles of `cos_sin`; returns x's dtype.

    is_interleaved  x has the two elements of a pair adjacent; the result has them in separate halves, as the order of a head's
                    dims does not matter as long as queries and keys agree
    """
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    if is_interleaved:
        a, b = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    # With f32 tables the products are promoted to f32 and rounded once, at the end.
    return torch.cat(((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest), dim=-1)


def query_factors(scaling: QueryScaling, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factors [T, 1, 1] on the queries of tokens at `positions` [T]."""
    steps = torch.floor((positions.float() + scaling.offset) / scaling.original_max)
    return (1 + scaling.beta * torch.log1p(steps)).to(dtype)[:, None, None]
