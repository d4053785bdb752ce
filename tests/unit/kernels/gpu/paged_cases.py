"""Steps over a paged cache with the equivalent dense keys and values, and attention in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.kernels.reference.attention import AttentionMetadata, TreeInput, store_kv


@dataclass
class PagedCase:
    step: AttentionMetadata
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: list
    v: list
    q: torch.Tensor


def make_case(lengths, counts, spec, block_size, dtype=torch.float32, trees=None, seed=0):
    """Return caches of sequences of these lengths, NaN where nothing is stored, and queries for the last `counts` of each.

    trees  per sequence the parents of its drafts, -1: the last known token; the first ones of more than its count are cached
    """
    generator = torch.Generator().manual_seed(seed)
    num_blocks = sum(-(-n // block_size) for n in lengths) + 2
    order = torch.randperm(num_blocks, generator=generator).tolist()
    shape = (num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
    k_cache, v_cache = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    tables = torch.zeros(len(lengths), max(-(-n // block_size) for n in lengths), dtype=torch.int64)
    slots, dense_k, dense_v, starts = [], [], [], [0]
    for index, length in enumerate(lengths):
        blocks = [order.pop() for _ in range(-(-length // block_size))]
        tables[index, : len(blocks)] = torch.tensor(blocks)
        positions = torch.arange(length)
        place = torch.tensor(blocks)[positions // block_size] * block_size + positions % block_size
        k, v = (torch.randn(length, *shape[1::2], generator=generator).to(dtype) for _ in range(2))
        store_kv(k, v, k_cache, v_cache, place)
        slots.append(place[length - counts[index] :])
        dense_k.append(k)
        dense_v.append(v)
        starts.append(starts[-1] + counts[index])
    q = torch.randn(sum(counts), spec.num_heads, spec.head_dim, generator=generator).to(dtype)
    step = AttentionMetadata(torch.cat(slots), starts, list(lengths), tables, _tree_input(trees, counts))
    return PagedCase(step, k_cache, v_cache, dense_k, dense_v, q)


def _tree_input(trees, counts):
    if trees is None:
        return None
    ancestors = []
    for parents, count in zip(trees, counts, strict=True):
        masks = []
        for node, parent in enumerate(parents):
            masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
        ancestors += [0] * (count - len(parents)) + masks[-count:]
    return TreeInput(torch.tensor([len(parents) for parents in trees], dtype=torch.int32), torch.tensor(ancestors))


def dense_attention(case, spec, sinks=None):
    """Return [T, H, D] in float64, query by query."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    group = spec.num_heads // spec.num_kv_heads
    for index, length in enumerate(case.step.context_lens):
        first, last = case.step.query_starts[index], case.step.query_starts[index + 1]
        for token in range(first, last):
            seen = _seen_positions(case.step, index, token, length - (last - token))
            seen = [(place, at) for place, at in seen if at > seen[-1][1] - (spec.window or 1 << 30)]
            keys, distances = torch.tensor([place for place, _ in seen]), torch.tensor([seen[-1][1] - at for _, at in seen])
            for head in range(spec.num_heads):
                k = case.k[index][keys, head // group].double()
                v = case.v[index][keys, head // group].double()
                scores = k @ case.q[token, head].double() * spec.scale
                if spec.softcap is not None:
                    scores = spec.softcap * torch.tanh(scores / spec.softcap)
                if spec.alibi_slopes:
                    scores = scores - spec.alibi_slopes[head] * distances
                if sinks is None:
                    out[token, head] = scores.softmax(0) @ v
                else:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                    out[token, head] = scores.softmax(0)[:-1] @ v
    return out


def _seen_positions(step, index, token, place):
    """Return (place in the cache, position) of what a query sees, itself last."""
    num_drafts = 0 if step.trees is None else int(step.trees.num_drafts[index])
    tree_start = step.context_lens[index] - num_drafts
    if place < tree_start:
        return [(p, p) for p in range(place + 1)]
    mask = int(step.trees.ancestors[token])
    path = [draft for draft in range(num_drafts) if mask >> draft & 1]
    return [(p, p) for p in range(tree_start)] + [(tree_start + d, tree_start + depth) for depth, d in enumerate(path)]
