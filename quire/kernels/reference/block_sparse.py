"""Attention to the blocks of keys that an indexer chooses (MiniMax-M3), over the paged KV cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.model_spec import AttentionSpec
from quire.contracts.sparse_spec import BlockIndexerSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.reference.compressed_attention import EntryCache

_MAX_SCORE_ELEMENTS = 1 << 24
"""Maximum number of scores held at once, over all heads."""


def attend_blocks(
    q: Tensor,
    index: tuple[Tensor, Tensor],
    index_cache: EntryCache,
    caches: tuple[Tensor, Tensor],
    step: AttentionMetadata,
    spec: AttentionSpec,
) -> Tensor:
    """Store the indexer's keys, and attend every query to the blocks of its sequence that the indexer chooses.

    q            [T, H, D]
    index        the indexer's heads [T, Hi, Di] and keys [T, Di]
    index_cache  of these keys, one entry a token
    caches       keys and values [num_blocks, K, block_size, D]; this step's are already stored
    Returns      [T, H, D] in q's dtype
    """
    indexer = spec.block_indexer
    assert indexer is not None
    heads, keys = index
    out = torch.empty_like(q)
    for sequence, length in enumerate(step.context_lens):
        start, stop = step.query_starts[sequence], step.query_starts[sequence + 1]
        first = length - (stop - start)
        index_cache.write(sequence, first, keys[start:stop])
        index_keys = index_cache.read(sequence, length)
        k, v = (_gather(cache, step.block_tables[sequence], length, spec.num_heads) for cache in caches)
        tile = max(1, _MAX_SCORE_ELEMENTS // (spec.num_heads * length))
        for begin in range(start, stop, tile):
            rows = slice(begin, min(begin + tile, stop))
            positions = torch.arange(rows.start, rows.stop) - start + first
            is_kept = choose_blocks(heads[rows], index_keys, positions, indexer)
            is_kept = is_kept.repeat_interleave(spec.num_heads // indexer.num_heads, 0)
            scores = torch.matmul(q[rows].transpose(0, 1), k.transpose(1, 2)) * spec.scale
            shares = scores.masked_fill(~is_kept, -torch.inf).softmax(-1, dtype=torch.float32).to(q.dtype)
            out[rows] = torch.matmul(shares, v).transpose(0, 1)
    return out


def choose_blocks(heads: Tensor, keys: Tensor, positions: Tensor, indexer: BlockIndexerSpec) -> Tensor:
    """Return which of N keys the queries at `positions` [T] attend to, for each head of the indexer: [Hi, T, N] bool.

    heads, keys  [T, Hi, Di], [N, Di]
    """
    size = min(indexer.block_size, len(keys))  # blocks as long as the sequence are one block
    is_seen = torch.arange(len(keys)) <= positions[:, None]
    scores = torch.matmul(heads.float().transpose(0, 1), keys.float().T).masked_fill(~is_seen, -torch.inf)
    scores = F.pad(scores, (0, -len(keys) % size), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
    num_local = min(indexer.num_local, scores.shape[-1])
    local = ((positions // size)[:, None] - torch.arange(num_local)).clamp(min=0)
    scores = scores.scatter(-1, local.expand(len(scores), -1, -1), torch.inf)
    chosen = scores.topk(min(indexer.top_blocks, scores.shape[-1]), dim=-1).indices
    is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
    return is_chosen.repeat_interleave(size, -1)[..., : len(keys)] & is_seen


def _gather(cache: Tensor, block_table: Tensor, length: int, num_heads: int) -> Tensor:
    """Return the first `length` rows of a sequence for each head of attention, [H, N, D]."""
    blocks = block_table[: -(-length // cache.shape[2])]
    rows = cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
    return rows.repeat_interleave(num_heads // rows.shape[0], 0)
