"""Attention to a window of rows and to compressed entries of all tokens before (DeepSeek-V4), over the paged KV cache.

An entry lies in the block of the last token that it is made of: a block that is full is complete, and sequences that share it
have the same tokens up to its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.model_spec import AttentionSpec
from quire.contracts.sparse_spec import CompressionSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.reference.indexed_attention import IndexQueries, choose_keys

_MAX_SCORE_ELEMENTS = 1 << 24
"""Maximum number of scores held at once, over all heads."""


@dataclass(frozen=True, slots=True)
class EntryCache:
    """Where the entries of one layer lie: `cache` [num_blocks, 1, block_size, D] has those of each block one after the other.

    block_tables  [S, max_blocks] i64
    size          values of an entry
    """

    cache: Tensor
    block_tables: Tensor
    size: int
    rate: int

    def write(self, sequence: int, first: int, entries: Tensor) -> None:
        """Write entries [N, size], the first of which is entry `first` of a sequence."""
        self._entries[self._places(sequence, first, first + len(entries))] = entries

    def read(self, sequence: int, count: int) -> Tensor:
        """Return the first `count` entries [count, size] of a sequence."""
        return self._entries[self._places(sequence, 0, count)]

    @property
    def _entries(self) -> Tensor:
        """A view [num_blocks, entries of a block, size]."""
        count = -(-self.cache.shape[2] // self.rate)
        return self.cache.flatten(1)[:, : count * self.size].unflatten(1, (count, self.size))

    def _places(self, sequence: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the blocks of entries [first, last), and their places in these."""
        entries, block_size = torch.arange(first, last), self.cache.shape[2]
        blocks = ((entries + 1) * self.rate - 1) // block_size
        return self.block_tables[sequence][blocks], entries - blocks * block_size // self.rate


def new_entries(step: AttentionMetadata, sequence: int, rate: int) -> tuple[int, int]:
    """Return the first entry whose last token a step computes of a sequence, and the one after the last."""
    length = step.context_lens[sequence]
    num_tokens = step.query_starts[sequence + 1] - step.query_starts[sequence]
    return (length - num_tokens) // rate, length // rate


def compress(kv: Tensor, gate: Tensor, table: Tensor, first: int, spec: CompressionSpec) -> Tensor:
    """Return entries [N, D] from entry `first` on, neither normalised nor rotated.

    kv, gate  the projections of their tokens, [N * rate, D], with overlap [(N + 1) * rate, 2 * D]; entry 0 has no tokens before
    table     [rate, D] f32, with overlap [rate, 2 * D]
    """
    kv, gate = kv.unflatten(0, (-1, spec.rate)), gate.unflatten(0, (-1, spec.rate)) + table
    if spec.has_overlap:
        half = kv.shape[-1] // 2
        if first == 0:
            kv = torch.cat((torch.zeros_like(kv[:1]), kv))
            gate = torch.cat((torch.full_like(gate[:1], -torch.inf), gate))
        kv, gate = (torch.cat((y[:-1, :, :half], y[1:, :, half:]), 1) for y in (kv, gate))
    return (kv * gate.softmax(1, dtype=torch.float32).to(kv.dtype)).sum(1)


def read_rows(cache: Tensor, block_table: Tensor, first: int, last: int) -> Tensor:
    """Return the rows [last - first, D] of a sequence's tokens [first, last), of a cache [num_blocks, 1, block_size, D]."""
    positions = torch.arange(first, last)
    return cache[block_table[positions // cache.shape[2]], 0, positions % cache.shape[2]]


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of one sequence [N, D], and of the indexer [N, Di] with its queries of the step; None: all are attended to."""

    rows: Tensor
    index_keys: Tensor | None = None
    index: IndexQueries | None = None


def attend_rows(
    q: Tensor,
    cache: Tensor,
    step: AttentionMetadata,
    sequence: int,
    entries: Entries | None,
    spec: AttentionSpec,
    sinks: Tensor,
) -> Tensor:
    """Return what the queries of one sequence get of the rows of their windows and of entries, [T, H, D] in q's dtype.

    q      [T, H, D], its queries
    cache  [num_blocks, 1, block_size, >= D], this step's rows are stored in the first D values
    sinks  [H], as in `attend`
    """
    length, table, count = step.context_lens[sequence], step.block_tables[sequence], 0 if entries is None else len(entries.rows)
    window = length if spec.window is None else spec.window
    out = torch.empty_like(q)
    tile = max(1, _MAX_SCORE_ELEMENTS // (spec.num_heads * (min(length, window + len(q)) + count)))
    for begin in range(0, len(q), tile):
        queries = slice(begin, min(begin + tile, len(q)))
        positions = torch.arange(length - len(q) + queries.start, length - len(q) + queries.stop)
        first, last = max(0, int(positions[0]) - window + 1), int(positions[-1]) + 1
        rows = read_rows(cache, table, first, last)[:, : spec.head_dim]
        distance = positions[:, None] - torch.arange(first, last)
        is_hidden = (distance < 0) | (distance >= window)
        if entries is not None and count > 0:
            rows = torch.cat((rows, entries.rows))
            is_hidden = torch.cat((is_hidden, _hidden_entries(entries, positions, queries, spec)), 1)
        out[queries] = _attend(q[queries], rows, is_hidden, spec.scale, sinks)
    return out


def _hidden_entries(entries: Entries, positions: Tensor, queries: slice, spec: AttentionSpec) -> Tensor:
    """Return which entries the queries at `positions` do not attend to, [T, N]."""
    compression = spec.compression
    assert compression is not None
    is_hidden = torch.arange(len(entries.rows)) >= (positions[:, None] + 1) // compression.rate
    if compression.indexer is None or entries.index is None or entries.index_keys is None:
        return is_hidden
    index = IndexQueries(entries.index.heads[queries], entries.index.weights[queries])
    return is_hidden | ~choose_keys(index, entries.index_keys, is_hidden, compression.indexer)


def _attend(q: Tensor, rows: Tensor, is_hidden: Tensor, scale: float, sinks: Tensor) -> Tensor:
    scores = torch.einsum("thd,sd->hts", q, rows) * scale
    scores = scores.masked_fill(is_hidden, -torch.inf)
    logits = torch.cat((scores.float(), sinks.float()[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hts,sd->thd", logits.softmax(-1)[..., :-1].to(q.dtype), rows)
