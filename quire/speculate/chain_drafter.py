"""ChainDrafter: what drafts whole chains where the model and its cache are, as on a GPU; and what a cache is to proposers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from quire.contracts.kv_spec import KvSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.model.token_runs import TokenRuns
from quire.sampling.row_state import SamplingRow


class BlockCache(Protocol):
    """A cache of keys and values, as who counts what its blocks hold sees it."""

    @property
    def spec(self) -> KvSpec:
        """Its shape."""
        ...

    @property
    def num_blocks(self) -> int:
        """How many blocks it has."""
        ...

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy whole blocks, (source, target) pairs; all sources are read before any target is written."""
        ...


class ChainOrder(NamedTuple):
    """What is to be drafted behind runs of known tokens.

    runs         the tokens to compute, see TokenRuns; the block tables have room for the drafts
    origins      places, starts of blocks, from which on each sequence is seen
    counts       drafts of each; 0: its tokens are computed, and no more
    rows         how each is sampled
    positions    where the first draft of each will stand, for the noise
    least_share  of greedy drafts: those end before the first with which all of them are less likely; 0: all are made
    """

    runs: TokenRuns
    origins: list[int]
    counts: list[int]
    rows: Sequence[SamplingRow]
    positions: list[int]
    least_share: float = 0.0


class ChainDrafter(Protocol):
    """Drafts chains of all sequences, each token drawn where its logits are."""

    @property
    def kv(self) -> BlockCache:
        """Where it keeps keys and values, under the target's block ids."""
        ...

    def draft_chains(self, order: ChainOrder, features: Tensor | None = None) -> list[list[int]]:
        """Compute the runs, keep their KV, and return the drafts.

        features  [T, H] of the runs' tokens, as HeadDrafter.narrow returned them; None where tokens are all that is read
        """
        ...


@runtime_checkable
class HeadDrafter(ChainDrafter, Protocol):
    """Drafts with a head; trees by one pass after the other."""

    def narrow(self, features: Tensor) -> Tensor:
        """Return features [R, F] of the model in the form in which they are to wait [R, H], and to be given back."""
        ...

    def enter(
        self, token_ids: Tensor, positions: Tensor, step: AttentionMetadata, kv: BlockCache, features: Tensor, rows: list[int]
    ) -> Tensor:
        """Compute tokens behind their features, store their KV, and return the logits [R, V'] of some rows."""
        ...

    def recycled(self, count: int) -> Tensor:
        """Return what the first `count` rows of the last `enter` are features of the next places with [count, H]."""
        ...
