"""ChainDrafter: protocol of drafters that draft whole chains on the device of their model; BlockCache: protocol of caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from quire.contracts.kv_spec import KvSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.model.token_runs import TokenRuns
from quire.sampling.row_state import SamplingRow


class BlockCache(Protocol):
    """A cache of keys and values, as FilledBlocks needs it."""

    @property
    def spec(self) -> KvSpec:
        """The shape of the cache."""
        ...

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        ...

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy whole blocks, (source, target) pairs; all sources are read before any target is written."""
        ...


class ChainOrder(NamedTuple):
    """A request for drafts after runs of known tokens.

    runs         the tokens to compute, see TokenRuns; the block tables have room for the drafts
    origins      first position, a start of a block, that each sequence attends to
    counts       number of drafts of each sequence; 0: only its tokens are computed
    rows         sampling state of each sequence
    positions    position of the first draft of each sequence, for the noise
    least_share  a greedy draft ends before the first token at which its whole probability is lower; 0: it never ends early
    """

    runs: TokenRuns
    origins: list[int]
    counts: list[int]
    rows: Sequence[SamplingRow]
    positions: list[int]
    least_share: float = 0.0


class ChainDrafter(Protocol):
    """Drafts chains for all sequences; each token is sampled on the device of its logits."""

    @property
    def kv(self) -> BlockCache:
        """Its cache of keys and values, under the target's block ids."""
        ...

    def draft_chains(self, order: ChainOrder, features: Tensor | None = None) -> list[list[int]]:
        """Compute the runs, store their KV, and return the drafts.

        features  [T, H] of the runs' tokens, as HeadDrafter.fuse_features returned them; None if only tokens are read
        """
        ...


@runtime_checkable
class HeadDrafter(ChainDrafter, Protocol):
    """Drafts with a head; trees are drafted with one `enter` per level."""

    def fuse_features(self, features: Tensor) -> Tensor:
        """Return the model's features [R, F] in the form [R, H] in which they are kept and passed to draft_chains."""
        ...

    def enter(
        self, token_ids: Tensor, positions: Tensor, step: AttentionMetadata, kv: BlockCache, features: Tensor, rows: list[int]
    ) -> Tensor:
        """Compute tokens with the features before them, store their KV, and return the logits [R, V'] of some rows."""
        ...

    def recycled(self, count: int) -> Tensor:
        """Return the first `count` output rows of the last `enter`, [count, H], as features of the next positions."""
        ...
