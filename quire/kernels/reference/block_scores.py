"""Scores of the blocks of a KV cache, by which KV compression chooses what to evict; see contracts/kv_compression.py."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.contracts.model_spec import AttentionSpec


def attention_by_block(q: Tensor, keys: Tensor, spec: AttentionSpec, block_size: int) -> Tensor:
    """Return the attention weights of one query, summed over heads and over the tokens of each block.

    One query at a time, so that the sums do not depend on how a prompt is cut into chunks.

    q        [H, D] f32, rotated; H is a multiple of K
    keys     [K, N, D] f32, rotated: those that the query attends to, in order of their places
    Returns  [ceil(N / block_size)] f64
    """
    num_kv_heads, num_keys, head_dim = keys.shape
    scores = (q.view(num_kv_heads, -1, head_dim) @ keys.transpose(1, 2)).view(-1, num_keys) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    weights = torch.softmax(scores, -1).double().sum(0)
    num_blocks = -(-num_keys // block_size)
    padded = torch.zeros(num_blocks * block_size, dtype=torch.float64)
    padded[:num_keys] = weights
    return padded.view(num_blocks, block_size).sum(1)


def key_norms(keys: Tensor, block_size: int) -> Tensor:
    """Return the norms of keys, summed over heads and over the tokens of each block.

    keys     [K, N, D] f32, N a multiple of block_size
    Returns  [N / block_size] f64
    """
    return keys.double().norm(dim=-1).sum(0).view(-1, block_size).sum(1)
