"""Alternating updates of several residual streams (https://arxiv.org/abs/2301.13310), with the rounding points of Gemma 3n."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_SQUARE = 1e-5
"""The least mean square that a stream is divided by the root of."""


def modalities(x: Tensor, router: Tensor) -> Tensor:
    """Return tanh of what the router says of normed rows: x [T, H], router [N, H] -> [T, N] in x's dtype."""
    scaled = x * torch.tensor(1 / x.shape[-1], dtype=x.dtype)
    return torch.tanh(F.linear(scaled, router).float()).to(x.dtype)


def predict(streams: Tensor, routed: Tensor, coefficients: Tensor) -> Tensor:
    """Return the streams [N, T, H] before a layer: each is itself plus a mixture of all.

    routed        [T, N], `modalities` of the active stream
    coefficients  [N * N, N]
    """
    num_streams = len(streams)
    mixing = F.linear(routed, coefficients).view(-1, num_streams, num_streams).transpose(1, 2)
    return torch.matmul(streams.permute(1, 2, 0), mixing).permute(2, 0, 1) + streams


def correct(predicted: Tensor, active: int, output: Tensor, routed: Tensor, coefficients: Tensor) -> Tensor:
    """Return the streams [N, T, H] after a layer: each moves by a share of what the layer changed in the active one.

    output        [T, H], the layer's
    routed        [T, N], `modalities` of the output
    coefficients  [N, N]
    """
    shares = F.linear(routed, coefficients) + 1.0
    return (output - predicted[active]) * shares.t()[..., None] + predicted


def split_streams(x: Tensor, projections: Tensor) -> Tensor:
    """Return the streams [N, T, H] of embeddings x [T, H]: x and its projections [N - 1, H, H], as large as x."""
    return torch.stack([x, *(_as_large(F.linear(x, projection), x) for projection in projections)])


def join_streams(streams: Tensor, projections: Tensor) -> Tensor:
    """Return the mean [T, H] of the first stream and the projections of the others, as large as the first."""
    first = streams[0]
    others = (_as_large(F.linear(x, projection), first) for x, projection in zip(streams[1:], projections, strict=True))
    return torch.stack([first, *others]).mean(0)


def _as_large(x: Tensor, like: Tensor) -> Tensor:
    """Return x with the root mean square of `like`, row by row."""
    size = like.square().mean(-1, keepdim=True) ** 0.5
    return x * size / x.square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()
