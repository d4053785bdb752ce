"""Attention to the blocks of keys that an indexer chooses (MiniMax-M3); nothing waits for the device.

A query, with the heads that share a choice, is computed as a sequence of one token, whose block table has the chosen blocks.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.model_spec import AttentionSpec
from quire.contracts.sparse_spec import BlockIndexerSpec
from quire.kernels.triton.attention import KvCache, attend
from quire.kernels.triton.indexer import IndexInputs, choose, scores_of
from quire.kernels.triton.step import DeviceAttentionMetadata


class HeadsOfRank(NamedTuple):
    """first: this rank's first query head; total: those of all ranks."""

    first: int
    total: int


def attend_blocks(
    q: Tensor,
    index: IndexInputs,
    cache: KvCache,
    step: DeviceAttentionMetadata,
    spec: AttentionSpec,
    heads: HeadsOfRank,
    is_in_order: bool = False,
) -> Tensor:
    """Attend every query to the keys, itself included, of the blocks that the indexer chooses for each of its heads, causally.

    q        [T, H, D], contiguous, rotated; the keys of this step, and its values, are already stored
    Returns  [T, H, D] in q's dtype, zeros for padding
    """
    indexer = spec.block_indexer
    assert indexer is not None
    found: list[Tensor] = []
    for own, rows, scores in scores_of(index, step, indexer):
        tokens = torch.arange(own.start, own.stop, dtype=torch.int32, device=q.device)
        places = step.context_lens[rows] - step.query_starts[rows + 1] + tokens  # negative for padding
        chosen, counts = _choose_blocks(scores, places, indexer)
        found.append(_attend(q[own], cache, step.block_tables[rows], places, chosen, counts, spec, heads, is_in_order))
    return found[0] if len(found) == 1 else torch.cat(found)


def _choose_blocks(scores: Tensor, places: Tensor, indexer: BlockIndexerSpec) -> tuple[Tensor, Tensor]:
    """Return the blocks that heads choose for queries at `places` [T], as `choose` does: [T, H, B] and [T, H].

    scores  [T, H, keys] f32; -inf: not seen
    """
    size, num_keys = indexer.block_size, scores.shape[-1]
    scores = F.pad(scores, (0, -num_keys % size), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
    blocks = torch.arange(scores.shape[-1], device=scores.device)
    behind = (places // size)[:, None, None] - blocks
    is_local = (behind >= 0) & (behind < indexer.num_local) & (scores > -torch.inf)
    chosen, counts = choose(scores.masked_fill(is_local, torch.inf).flatten(0, 1), indexer.top_blocks)
    return chosen.unflatten(0, scores.shape[:2]), counts.unflatten(0, scores.shape[:2])


def _attend(
    q: Tensor,
    cache: KvCache,
    tables: Tensor,
    places: Tensor,
    chosen: Tensor,
    counts: Tensor,
    spec: AttentionSpec,
    heads: HeadsOfRank,
    is_in_order: bool,
) -> Tensor:
    """Return the attention to chosen blocks; tables [T, blocks]: of the sequence of each query."""
    indexer = spec.block_indexer
    assert indexer is not None
    of_index, of_kv = heads.total // indexer.num_heads, spec.num_heads // spec.num_kv_heads
    group = math.gcd(of_index, of_kv, heads.first)  # heads that share both
    firsts = torch.arange(0, spec.num_heads, group, device=q.device)
    chosen, counts = (one[:, (firsts + heads.first) // of_index] for one in (chosen, counts))  # [T, groups, ...]
    # Units are the largest pieces of which both blocks of the indexer and of the cache consist.
    _, num_kv_heads, block_size, dim = cache.k.shape
    unit, size = math.gcd(block_size, indexer.block_size), indexer.block_size
    units = (chosen[..., None] * (size // unit) + torch.arange(size // unit, device=q.device)).flatten(2)
    numbers = (units * unit // block_size).clamp_(max=tables.shape[1] - 1)
    blocks = tables.long().gather(1, numbers.flatten(1)).view_as(numbers) * num_kv_heads + (firsts // of_kv)[:, None]
    units = blocks * (block_size // unit) + units * unit % block_size // unit
    # The block of the query itself is its last one, and ends with it.
    last = chosen.gather(2, (counts - 1).clamp_(min=0).long()[..., None])[..., 0]
    is_own = (last == (places // size)[:, None]) & (counts > 0)
    lengths = counts * size - torch.where(is_own, (size - 1 - places % size)[:, None], 0)
    num_rows, most = len(q) * len(firsts), chosen.shape[2] * size
    starts = torch.arange(num_rows + 1, dtype=torch.int32, device=q.device)
    own = DeviceAttentionMetadata.of_decode(
        starts[:-1].long(), starts, lengths.flatten().int(), units.flatten(0, 1).int(), most, is_even=True
    )
    alone = replace(spec, num_heads=group, num_kv_heads=1, block_indexer=None)
    single = KvCache(*(part.view(-1, 1, unit, dim) for part in (cache.k, cache.v)))
    return attend(q.view(num_rows, group, dim), single, own, alone, None, is_in_order).view_as(q)
