"""Attention that reads a part of the tokens before: entries that stand for several, and blocks that an indexer chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.contracts.model_spec import IndexerSpec, NormSpec


@dataclass(frozen=True, slots=True)
class CompressionSpec:
    """Entries of the KV cache that stand for `rate` consecutive tokens each (DeepSeek-V4).

    An entry is the sum of a projection of its tokens, weighed value by value: by the softmax, over the tokens, of a second
    projection plus a learned table. It is normalised, and rotated at the position of its first token. Queries attend to
    entries whose tokens are all at or before theirs.

    has_overlap  both projections have two halves: an entry is made of the second halves of its own tokens and the first halves
                 of the `rate` tokens before them
    indexer      chooses the entries that a query attends to, by smaller entries of its own that are made in the same way; None:
                 all are attended to
    """

    rate: int
    has_overlap: bool = False
    indexer: IndexerSpec | None = None

    @property
    def num_source_tokens(self) -> int:
        """How many tokens an entry is made of."""
        return self.rate * (2 if self.has_overlap else 1)

    def source_sizes(self, head_dim: int) -> tuple[int, ...]:
        """Return the values of each projection of a token that entries are made of: for the entries, and for the indexer's."""
        dims = (head_dim,) if self.indexer is None else (head_dim, self.indexer.head_dim)
        return tuple(dim * (2 if self.has_overlap else 1) for dim in dims)

    def entries_per_block(self, block_size: int) -> int:
        """Return the most entries whose last tokens lie in one block, which holds them."""
        return -(-block_size // self.rate)


@dataclass(frozen=True, slots=True)
class SharedKvSpec:
    """Multi-query attention whose key and value are one row per token (DeepSeek-V4).

    Queries are made of a latent row; each head of them is normalised without a weight. The last values of heads and rows are
    rotated, pairs of neighbours, and those of the output rotated back. Its heads are in num_groups equal groups; each is
    projected to group_rank values, and all of these to the output.

    q_rank       size of the latent row that queries are made of
    norm         of latent rows, queries and rows
    compression  what is attended to in addition to the window; None: nothing
    """

    q_rank: int
    num_groups: int
    group_rank: int
    norm: NormSpec
    compression: CompressionSpec | None = None


@dataclass(frozen=True, slots=True)
class BlockIndexerSpec:
    """What chooses the blocks of keys that a query attends to (MiniMax-M3).

    Blocks are of block_size consecutive tokens from the first on. The score of a block is the largest product of a head of the
    indexer with one of the block's keys, at or before the query; each head chooses the best top_blocks blocks, for an equal
    share of the heads of attention.

    num_local  the query's own block and those just before it, so many together, are always chosen
    norm       of heads and keys, before they are rotated as those of attention
    """

    num_heads: int
    head_dim: int
    block_size: int
    top_blocks: int
    num_local: int
    norm: NormSpec
