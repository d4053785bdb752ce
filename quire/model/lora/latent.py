"""Adapters of kv_b, the projection out of the latent space of multi-head latent attention, which decoders compute absorbed.

A head has rows W_k and W_v of kv_b. Its queries q are projected into the space of the cached rows c as W_k^T q, and what it
attends to leaves it as W_v c. With an adapter b (a c) of kv_b, whose rows of the head are b_k and b_v, these products are
W_k^T q + a^T (b_k^T q) and W_v c + b_v (a c): both stay of low rank.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from quire.contracts.model_spec import LatentSpec
from quire.model.lora.experts import LowRankPair


class HeadRows(NamedTuple):
    """The rows of an adapter's second matrix by heads: keys [H, nope_dim, rank], values [H, value_dim, rank]."""

    keys: Tensor
    values: Tensor


def is_absorbed(name: str) -> bool:
    """Return whether a canonical name without ".weight" is that of kv_b of a layer with latent attention."""
    return name.endswith(".kv_b")


def split_heads(pair: LowRankPair, latent: LatentSpec) -> HeadRows:
    """Return the rows of the heads that b of an adapter of kv_b has."""
    rows = pair.b.view(-1, latent.nope_dim + latent.value_dim, pair.b.shape[1])
    return HeadRows(rows[:, : latent.nope_dim], rows[:, latent.nope_dim :])
