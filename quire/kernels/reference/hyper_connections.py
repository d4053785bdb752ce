"""Hyper-connections with doubly stochastic mixing (mHC, https://arxiv.org/abs/2512.24880)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.model_spec import HyperSpec
from quire.kernels.reference.norm import normalize


class HyperWeights(NamedTuple):
    """Parameters, f32: weight [M, N * H] and bias [M] of M numbers, and a scale of each kind of them."""

    weight: Tensor
    bias: Tensor
    scale: Tensor


class Connection(NamedTuple):
    """What connects a block to streams [T, N, H]: what it reads [T, H], and in f32 what is added to each stream of its output
    [T, N], and how much of stream i goes on in stream j, [T, N (i), N (j)]."""

    read: Tensor
    added: Tensor
    mixing: Tensor

    def join(self, streams: Tensor, y: Tensor) -> Tensor:
        """Return the streams after a block with the output y [T, H]."""
        mixed = torch.matmul(self.mixing.to(y.dtype).transpose(-1, -2), streams)
        return self.added.to(y.dtype)[..., None] * y[:, None] + mixed


def connect(streams: Tensor, spec: HyperSpec, weights: HyperWeights) -> Connection:
    """Return the connection of a block to streams [T, N, H]; M is spec.num_weights, of three kinds."""
    count = spec.num_streams
    products, biases = F.linear(_flat(streams, spec), weights.weight), weights.bias
    sizes = (count, count, count * count)
    read, added, mixing = (
        product * scale + bias
        for product, bias, scale in zip(products.split(sizes, -1), biases.split(sizes), weights.scale, strict=True)
    )
    return Connection(
        _weighed(streams, torch.sigmoid(read) + spec.eps),
        2 * torch.sigmoid(added),
        _doubly_stochastic(mixing.unflatten(-1, (count, count)), spec),
    )


def join_all(streams: Tensor, spec: HyperSpec, weights: HyperWeights) -> Tensor:
    """Return the sum [T, H] of streams [T, N, H] that the final norm reads; M is N, of one kind."""
    products = F.linear(_flat(streams, spec), weights.weight)
    return _weighed(streams, torch.sigmoid(products * weights.scale + weights.bias) + spec.eps)


def _flat(streams: Tensor, spec: HyperSpec) -> Tensor:
    return normalize(streams.flatten(1).float(), spec.norm, None)


def _weighed(streams: Tensor, weights: Tensor) -> Tensor:
    return (weights[..., None] * streams).sum(1).to(streams.dtype)


def _doubly_stochastic(mixing: Tensor, spec: HyperSpec) -> Tensor:
    """Return matrices [T, N, N] whose rows and columns sum to about 1, by the method of Sinkhorn and Knopp."""
    mixing = mixing.softmax(-1) + spec.eps
    mixing = mixing / (mixing.sum(-2, keepdim=True) + spec.eps)
    for _ in range(spec.num_iterations - 1):
        for dim in (-1, -2):
            mixing = mixing / (mixing.sum(dim, keepdim=True) + spec.eps)
    return mixing
