"""Latent attention to the keys that an indexer selects (DeepSeek-V3.2: https://arxiv.org/abs/2512.02556)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.model_spec import AttentionSpec, IndexerSpec
from quire.kernels.reference.attention import AttentionMetadata, hidden_keys


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """The indexer's queries: heads [T, H, D], and the weights of the heads [T, H] f32."""

    heads: Tensor
    weights: Tensor


def store_index_keys(keys: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write keys [T, D] into a cache [num_blocks, 1, block_size, D] at `slots` [T]."""
    size = cache.shape[2]
    cache[slots // size, 0, slots % size] = keys


def choose_all(index: IndexQueries, cache: Tensor, step: AttentionMetadata, indexer: IndexerSpec) -> list[Tensor]:
    """Return for each sequence which of its tokens each query does not attend to, [T, S]; the indexer selects them from the
    query's own token and those before it.

    cache  keys of the indexer [num_blocks, 1, block_size, D]; this step's are already stored
    """
    found: list[Tensor] = []
    for sequence, length in enumerate(step.context_lens):
        tokens = slice(step.query_starts[sequence], step.query_starts[sequence + 1])
        keys, is_hidden = _gather(cache, step.block_tables[sequence], length), hidden_keys(step, sequence)
        part = IndexQueries(index.heads[tokens], index.weights[tokens])
        found.append(is_hidden | ~choose_keys(part, keys, is_hidden, indexer))
    return found


def attend_indexed(q: Tensor, hidden: Sequence[Tensor], cache: Tensor, step: AttentionMetadata, spec: AttentionSpec) -> Tensor:
    """Attend every query to the rows of its sequence that are not hidden.

    q       [T, H, D]
    hidden  see choose_all
    cache   rows [num_blocks, 1, block_size, D], each both key and value; this step's are already stored
    Returns [T, H, D] in q's dtype
    """
    out = torch.empty_like(q)
    for sequence, length in enumerate(step.context_lens):
        tokens = slice(step.query_starts[sequence], step.query_starts[sequence + 1])
        rows = _gather(cache, step.block_tables[sequence], length)
        scores = torch.einsum("thd,sd->hts", q[tokens], rows) * spec.scale
        shares = scores.masked_fill(hidden[sequence], -torch.inf).softmax(-1, dtype=torch.float32).to(q.dtype)
        out[tokens] = torch.einsum("hts,sd->thd", shares, rows)
    return out


def choose_keys(index: IndexQueries, keys: Tensor, is_hidden: Tensor, indexer: IndexerSpec) -> Tensor:
    """Return which of the keys [S, D] each query attends to, [T, S]; of equal scores the first. is_hidden [T, S]: the masked
    ones."""
    products = torch.einsum("thd,sd->ths", index.heads.float(), keys.float()) * indexer.head_dim**-0.5
    scores = torch.einsum("th,ths->ts", index.weights, products.relu()).masked_fill(is_hidden, -torch.inf)
    top_k = min(indexer.top_k, keys.shape[0])
    least = scores.topk(top_k, dim=-1).values[:, -1:]
    better, equal = scores > least, scores == least
    return better | (equal & (equal.cumsum(-1) <= top_k - better.sum(-1, keepdim=True)))


def _gather(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    blocks = block_table[: -(-length // cache.shape[2])]
    return cache[blocks, 0].flatten(0, 1)[:length]
