"""The keys that an indexer chooses for each query (DeepSeek-V3.2), over the paged cache; nothing waits for the device.

Every query scores all keys of its sequence that it may see, and attends to the best top_k, of equal ones to the first. What it
chooses depends on its own sequence only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.contracts.model_spec import AttentionSpec, IndexerSpec
from quire.contracts.sparse_spec import BlockIndexerSpec
from quire.kernels.triton.attention import IS_FUSED, KvCache, attend
from quire.kernels.triton.indexer_kernels import _score_keys
from quire.kernels.triton.launching import ELEMENT_TYPES, Launch, check_contiguous
from quire.kernels.triton.sizes import ceil_divide, power_of_two
from quire.kernels.triton.step import DeviceAttentionMetadata

SCORES_AT_ONCE = 1 << 26
"""Scores of a launch, of some tokens for all keys that there may be: a quarter of a GiB. The other tokens follow."""
_KEYS = 64


class IndexInputs(NamedTuple):
    """heads [T, H, D] of the indexer's queries, rotated; weights [T, H] f32, None where each head chooses; keys [num_blocks, 1,
    block_size, D], its cache."""

    heads: Tensor
    weights: Tensor | None
    keys: Tensor


def choose_keys(
    index: IndexInputs, block_size: int, step: DeviceAttentionMetadata, indexer: IndexerSpec
) -> list[DeviceAttentionMetadata]:
    """Return the keys that the indexer chooses for each query, itself included, causally: steps of consecutive queries, each a
    sequence of one query in blocks of one token. This step's index keys are already stored."""
    found: list[DeviceAttentionMetadata] = []
    for own, sequences, scores in scores_of(index, step, indexer):
        chosen, counts = choose(scores, indexer.top_k)
        slots = _slots_of(chosen, step.block_tables, sequences, block_size)
        starts = torch.arange(len(scores) + 1, dtype=torch.int32, device=scores.device)
        most = chosen.shape[1]
        found.append(DeviceAttentionMetadata.of_decode(step.slots[own], starts, counts, slots, most, is_even=True))
    return found


def attend_chosen(
    q: Tensor, chosen: Sequence[DeviceAttentionMetadata], rows: Tensor, spec: AttentionSpec, is_in_order: bool = False
) -> Tensor:
    """Attend every query to the latent rows of its chosen keys.

    q        [T, H, D], rotated
    chosen   see choose_keys
    rows     [num_blocks, 1, block_size, D], the cache of latent rows; this step's are already stored
    Returns  [T, H, kv_rank] in q's dtype, zeros for padding
    """
    single, first, found = rows.view(-1, 1, 1, rows.shape[-1]), 0, list[Tensor]()
    for places in chosen:
        own = q[first : first + len(places.slots)]
        found.append(attend(own, KvCache(single, single), places, spec, None, is_in_order))
        first += len(own)
    return found[0] if len(found) == 1 else torch.cat(found)


def scores_of(
    index: IndexInputs, step: DeviceAttentionMetadata, indexer: IndexerSpec | BlockIndexerSpec
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield consecutive tokens, at most as many as SCORES_AT_ONCE allows: which ones, their sequences [N] i32, and their scores
    of all keys, see score_keys_launch."""
    num_tokens, device = len(index.heads), index.heads.device
    shape = (() if index.weights is not None else (indexer.num_heads,)) + (max(1, step.max_context_len),)
    sequences, count = _sequences_of(step, num_tokens), max(1, SCORES_AT_ONCE // math.prod(shape))
    for first in range(0, num_tokens, count):
        own = slice(first, min(first + count, num_tokens))
        scores = torch.empty(own.stop - first, *shape, dtype=torch.float32, device=device)
        score_keys_launch(scores, index, sequences, step, indexer, first).run()
        yield own, sequences[own], scores


def choose(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return which keys have the best scores, [T, K] i64 in ascending order, and how many each row has, [T] i32.

    scores  [T, N] f32; -inf: never chosen. K is top_k, or N where that is less; what follows a row's number is any key
    """
    num_keys = scores.shape[1]
    top_k = min(top_k, num_keys)
    least = scores.topk(top_k, dim=1).values[:, -1:]
    better = scores > least
    equal = (scores == least) & (scores > -torch.inf)
    missing = top_k - better.sum(1, keepdim=True, dtype=torch.int32)
    is_chosen = better | (equal & (equal.cumsum(1, dtype=torch.int32) <= missing))
    # What is not chosen is written behind the last place.
    places = torch.where(is_chosen, is_chosen.cumsum(1, dtype=torch.int32) - 1, top_k).long()
    keys = torch.arange(num_keys, device=scores.device).expand_as(places)
    chosen = torch.zeros(len(scores), top_k + 1, dtype=torch.int64, device=scores.device).scatter_(1, places, keys)
    return chosen[:, :top_k], is_chosen.sum(1, dtype=torch.int32)


def _sequences_of(step: DeviceAttentionMetadata, num_tokens: int) -> Tensor:
    """Return the sequence of each token, [T] i32."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=step.slots.device)
    if step.is_decode:
        return tokens
    return torch.searchsorted(step.query_starts[1:], tokens, right=True, out_int32=True)


def _slots_of(keys: Tensor, block_tables: Tensor, sequences: Tensor, block_size: int) -> Tensor:
    """Return the slots [T, K] i32 of keys [T, K] i64 of the sequences of tokens."""
    tables = block_tables.index_select(0, sequences)
    return tables.gather(1, keys // block_size) * block_size + (keys % block_size).int()


def score_keys_launch(
    out: Tensor,
    index: IndexInputs,
    sequences: Tensor,
    step: DeviceAttentionMetadata,
    indexer: IndexerSpec | BlockIndexerSpec,
    first: int,
) -> Launch:
    """Return the launch that writes the scores [N, keys] f32, without weights [N, H, keys], of tokens [first, first + N); -inf:
    the token does not see the key. sequences [T] i32: of all tokens."""
    num_heads, dim = indexer.num_heads, indexer.head_dim
    weights = index.weights
    check_contiguous("scores", out, (None, None) if weights is not None else (None, num_heads, None), torch.float32)
    check_contiguous("index heads", index.heads, (None, num_heads, dim), *ELEMENT_TYPES)
    if weights is not None:
        check_contiguous("index weights", weights, (len(index.heads), num_heads), torch.float32)
    check_contiguous("index keys", index.keys, (None, 1, None, dim), index.heads.dtype)
    arguments = {
        "out_ptr": out,
        "q_ptr": index.heads,
        "weights_ptr": weights,
        "keys_ptr": index.keys,
        "sequences_ptr": sequences,
        "query_starts_ptr": step.query_starts,
        "context_lens_ptr": step.context_lens,
        "block_tables_ptr": step.block_tables,
        "num_drafts_ptr": step.num_drafts,
        "ancestors_ptr": step.ancestors,
        "first_token": first,
        "num_keys": out.shape[-1],
        "table_stride": step.block_tables.stride(0),
    }
    constants = {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": dim,
        "BLOCK_SIZE": index.keys.shape[2],
        "BLOCK_H": power_of_two(num_heads, 16),
        "BLOCK_D": power_of_two(dim, 16),
        "BLOCK_N": _KEYS,
        "SCALE": dim**-0.5,
        "COMPUTE": ELEMENT_TYPES[index.heads.dtype],
    }
    grid = (len(out), ceil_divide(out.shape[-1], _KEYS))
    return Launch(_score_keys, grid, arguments, constants, num_warps=4, num_stages=1, is_fused=IS_FUSED)
