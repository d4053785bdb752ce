"""HeadMatrices: adapters of kv_b of a layer with latent attention on a GPU; see quire.model.lora.latent."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.contracts.model_spec import AttentionSpec
from quire.kernels.triton.lora import HeadGroups, expand, shrink
from quire.model.lora.experts import LowRankPair
from quire.model.lora.latent import split_heads


class HeadMatrices(NamedTuple):
    """Of N adapters of rank R at most, for a layer of H heads; rows and columns past an adapter's rank are 0.

    key_a    [N * H, R, nope_dim], and key_b [N, kv_rank, R]: of the products of queries
    value_a  [N, R, kv_rank], and value_b [N * H, value_dim, R]: of those of values
    """

    key_a: Tensor
    key_b: Tensor
    value_a: Tensor
    value_b: Tensor

    @classmethod
    def zeros(cls, count: int, rank: int, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> HeadMatrices:
        """Return room for `count` adapters."""
        latent = spec.latent
        assert latent is not None
        heads = count * spec.num_heads
        shapes = (
            (heads, rank, latent.nope_dim),
            (count, latent.kv_rank, rank),
            (count, rank, latent.kv_rank),
            (heads, latent.value_dim, rank),
        )
        return cls(*(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes))

    def set(self, number: int, pair: LowRankPair | None, spec: AttentionSpec) -> None:
        """Write the matrices of an adapter, zeros for None."""
        for matrices in self:
            _part(matrices, number, len(self.value_a)).zero_()
        if pair is None:
            return
        assert spec.latent is not None
        heads, rank = split_heads(pair, spec.latent), len(pair.a)
        key_a, key_b, value_a, value_b = (_part(matrices, number, len(self.value_a)) for matrices in self)
        key_a[:, :rank].copy_(heads.keys.transpose(1, 2))
        key_b[0, :, :rank].copy_(pair.a.t())
        value_a[0, :rank].copy_(pair.a)
        value_b[..., :rank].copy_(heads.values)

    def add_to_keys(self, y: Tensor, x: Tensor, groups: HeadGroups) -> Tensor:
        """See AddsAdapters of kernels/triton/step.py."""
        out = y.contiguous()
        expand(out.flatten(0, 1), shrink(x.flatten(0, 1), self.key_a, groups.by_head), self.key_b, groups.by_adapter)
        return out

    def add_to_values(self, y: Tensor, x: Tensor, groups: HeadGroups) -> Tensor:
        """See AddsAdapters of kernels/triton/step.py."""
        out = y.contiguous()
        expand(out.flatten(0, 1), shrink(x.flatten(0, 1), self.value_a, groups.by_adapter), self.value_b, groups.by_head)
        return out


def _part(matrices: Tensor, number: int, count: int) -> Tensor:
    """Return the part of the number-th of `count` adapters."""
    own = len(matrices) // count
    return matrices[number * own : (number + 1) * own]
