"""EngineStats: counts of an engine, and what its ranks, experts and KV tiers do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.contracts.expert_stats import ExpertStats
from quire.contracts.rank_stats import RankStats
from quire.contracts.tier_stats import TierStats


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made: steps, and tokens computed in them.

    num_drafts           number of verifications of a sequence's drafts
    num_draft_tokens     tokens of these drafts
    num_accepted_tokens  those of them that were accepted
    accepted_per_pos     how often the first draft token was accepted, the second, and so on
    ranks                what each rank of a model on several processes does now, and has waited for; empty for one process
    experts              tokens of each expert of each layer, and the imbalance of the ranks that they are placed on; empty for
                         models without experts, and on GPUs and pipeline stages where they are not counted
    tiers                what each KV tier holds and has done: host, disk, peer; empty without tiers
    """

    num_steps: int = 0
    num_batched_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list[int])
    read_ranks: Callable[[], list[RankStats]] = field(default=list, repr=False, compare=False)
    read_tiers: Callable[[], list[TierStats]] = field(default=list, repr=False, compare=False)
    read_experts: Callable[[], list[ExpertStats]] = field(default=list, repr=False, compare=False)

    @property
    def ranks(self) -> list[RankStats]:
        """See above; read at each access."""
        return self.read_ranks()

    @property
    def experts(self) -> list[ExpertStats]:
        """See above; read at each access."""
        return self.read_experts()

    @property
    def tiers(self) -> list[TierStats]:
        """See above; read anew each time."""
        return self.read_tiers()

    def note_verified(self, num_drafts: int, num_accepted: int) -> None:
        """Count the results of the drafts of one sequence in one step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self.accepted_per_pos += [0] * (num_accepted - len(self.accepted_per_pos))
        for position in range(num_accepted):
            self.accepted_per_pos[position] += 1
