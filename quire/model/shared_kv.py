"""Multi-query attention whose key and value are one row, with compressed entries (SharedKvSpec), over the reference kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.model_spec import AttentionSpec, NormSpec
from quire.contracts.sparse_spec import CompressionSpec, SharedKvSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.reference.compressed_attention import Entries, EntryCache, attend_rows, compress, new_entries, read_rows
from quire.kernels.reference.indexed_attention import IndexQueries
from quire.kernels.reference.norm import normalize
from quire.kernels.reference.rope import rotate

Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class SharedKvInputs:
    """What a layer of one step computes with, besides its spec.

    parameters  of the layer, by their canonical names in it
    linear      called with an input [T, N] and the name of a linear layer
    angles      cos and sin at the positions of the tokens; angles_at: at positions [N] that it is called with
    step        the tokens' places in the rows, [num_blocks, 1, block_size, D] of `k` and `v`: where both are in the window
                group, in that group
    entries     the caches of entries, and of those of the indexer; empty without compression
    """

    parameters: Mapping[str, Tensor]
    linear: Callable[[Tensor, str], Tensor]
    angles: Angles
    angles_at: Callable[[Tensor], Angles]
    step: AttentionMetadata
    k: Tensor
    v: Tensor
    entries: tuple[EntryCache, ...] = ()


def shared_kv_attention(x: Tensor, spec: AttentionSpec, shared: SharedKvSpec, own: SharedKvInputs) -> Tensor:
    """Return the output [T, H] of attention of the tokens x [T, H] of a step, whose rows and entries are stored."""
    latent = _norm(own.linear(x, "q_a"), shared.norm, "q_a_norm", own)
    q = own.linear(latent, "q").view(len(x), spec.num_heads, spec.head_dim)
    scale = torch.rsqrt(q.float().square().mean(-1, keepdim=True) + shared.norm.eps)
    q = _rotate_last(q * scale.to(q.dtype), *own.angles)
    row = _rotate_last(_norm(own.linear(x, "kv"), shared.norm, "kv_norm", own)[:, None], *own.angles)[:, 0]
    names = () if shared.compression is None else ("entry", "index")[: len(own.entries)]
    _store(torch.cat((row, *(own.linear(x, f"{name}.kv") for name in names)), -1), own.k, own.step.slots)
    if names:
        _store(torch.cat([own.linear(x, f"{name}.gate") for name in names], -1), own.v, own.step.slots)
    index = None
    if shared.compression is not None and shared.compression.indexer is not None:
        indexer = shared.compression.indexer
        heads = own.linear(latent, "index_q").view(len(x), indexer.num_heads, indexer.head_dim)
        weights = own.linear(x, "index_weights").float() * indexer.num_heads**-0.5
        index = IndexQueries(_rotate_last(heads, *own.angles), weights)
    y = torch.empty_like(q)
    for sequence in range(len(own.step.context_lens)):
        tokens = slice(own.step.query_starts[sequence], own.step.query_starts[sequence + 1])
        found = None
        if shared.compression is not None:
            found = _entries(sequence, spec, shared.compression, shared.norm, own)
        if found is not None and index is not None:
            found = Entries(found.rows, found.index_keys, IndexQueries(index.heads[tokens], index.weights[tokens]))
        y[tokens] = attend_rows(q[tokens], own.k, own.step, sequence, found, spec, own.parameters["sinks.weight"])
    cos, sin = own.angles
    y = _rotate_back(y, cos, sin).reshape(len(x), shared.num_groups, -1)
    outer = own.parameters["o_a.weight"].view(shared.num_groups, shared.group_rank, -1)
    return own.linear(torch.bmm(y.transpose(0, 1), outer.transpose(1, 2)).transpose(0, 1).flatten(1), "o")


def _entries(sequence: int, spec: AttentionSpec, compression: CompressionSpec, norm: NormSpec, own: SharedKvInputs) -> Entries:
    """Return the entries of a sequence, after those whose last tokens are in the step have been made and stored."""
    first, last = new_entries(own.step, sequence, compression.rate)
    start, table = spec.head_dim, own.step.block_tables[sequence]
    before = min(first, 1 if compression.has_overlap else 0)
    tokens = (first - before) * compression.rate, last * compression.rate
    found: list[Tensor] = []
    k, v = (read_rows(cache, table, *tokens) if last > first else None for cache in (own.k, own.v))
    for name, size, cache in zip(("entry", "index"), compression.source_sizes(spec.head_dim), own.entries, strict=False):
        if k is not None and v is not None:
            kv, gate = k[:, start : start + size], v[:, start - spec.head_dim : start - spec.head_dim + size]
            entries = compress(kv, gate, own.parameters[f"{name}.table.weight"], first, compression)
            angles = own.angles_at(torch.arange(first, last) * compression.rate)
            entries = _rotate_last(_norm(entries, norm, f"{name}.norm", own)[:, None], *angles)[:, 0]
            cache.write(sequence, first, entries)
        found.append(cache.read(sequence, last))
        start += size
    return Entries(found[0], found[1] if len(found) > 1 else None)


def _rotate_last(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [T, H, D] whose last values are rotated, pairs of neighbours, which come to lie in two halves."""
    kept = heads.shape[-1] - 2 * cos.shape[-1]
    turned = rotate(heads[..., kept:], cos, sin, is_interleaved=True)
    return torch.cat((heads[..., :kept], turned), -1)


def _rotate_back(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [T, H, D] before `_rotate_last`."""
    kept = heads.shape[-1] - 2 * cos.shape[-1]
    turned = rotate(heads[..., kept:], cos, -sin).unflatten(-1, (2, -1))
    return torch.cat((heads[..., :kept], turned.transpose(-1, -2).flatten(-2)), -1)


def _norm(x: Tensor, spec: NormSpec, name: str, own: SharedKvInputs) -> Tensor:
    return normalize(x, spec, own.parameters[f"{name}.weight"])


def _store(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write rows [T, N] into the first N values of a cache [num_blocks, 1, block_size, >= N] at `slots` [T]."""
    cache[slots // cache.shape[2], 0, slots % cache.shape[2], : rows.shape[1]] = rows
