"""ExpertPlacement: which rank holds which experts of a layer. Arithmetic only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import ConfigError
from quire.parallel.shards import shard_sizes

Loads = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The experts of one layer on expert-parallel ranks. Each entry is a slot: room for one expert's weights.

    num_experts  of the layer
    ranks        the experts of each rank, in ascending order. An expert may be on several ranks, its copies, which divide its
                 tokens evenly; every expert is on at least one

    Raises ConfigError.
    """

    num_experts: int
    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for rank, experts in enumerate(self.ranks):
            if not experts:
                raise ConfigError(f"rank {rank} has no expert: each rank needs at least one of {self.num_experts}")
            for expert, count in Counter(experts).items():
                if not 0 <= expert < self.num_experts:
                    raise ConfigError(f"rank {rank} has expert {expert}; allowed: 0 to {self.num_experts - 1}")
                if count > 1:
                    raise ConfigError(f"rank {rank} has expert {expert} {count} times; allowed: once")
        missing = sorted(set(range(self.num_experts)) - {expert for experts in self.ranks for expert in experts})
        if missing:
            raise ConfigError(f"expert {missing[0]} is on no rank; each of {self.num_experts} experts must be on one at least")
        object.__setattr__(self, "ranks", tuple(tuple(sorted(experts)) for experts in self.ranks))

    @property
    def num_slots(self) -> int:
        """Experts of all ranks, copies included."""
        return sum(map(len, self.ranks))

    @property
    def num_copies(self) -> tuple[int, ...]:
        """How many ranks hold each expert."""
        counts = Counter(expert for experts in self.ranks for expert in experts)
        return tuple(counts[expert] for expert in range(self.num_experts))

    def own_copies(self, rank: int) -> tuple[int, ...]:
        """Return for each expert which of its copies a rank holds, counted over the ranks from 0; -1: none."""
        found = [-1] * self.num_experts
        for expert in self.ranks[rank]:
            found[expert] = sum(expert in experts for experts in self.ranks[:rank])
        return tuple(found)

    def rank_loads(self, tokens: Sequence[float]) -> Loads:
        """Return the tokens of each rank, given those of each expert."""
        loads = _checked_loads(tokens, self.num_experts) / np.array(self.num_copies)
        return np.array([loads[list(experts)].sum() for experts in self.ranks])

    def imbalance(self, tokens: Sequence[float], shares: Sequence[float] | None = None) -> float:
        """Return the largest load of a rank, divided by the mean; 1 without tokens.

        shares  relative speed of each rank, by which its load is divided; None: equal
        """
        loads = self.rank_loads(tokens) / relative_shares(shares, len(self.ranks))
        mean = float(np.sum(self.rank_loads(tokens))) / len(self.ranks)
        return float(loads.max()) / mean if mean > 0 else 1.0


def relative_shares(shares: Sequence[float] | None, num_ranks: int) -> Loads:
    """Return shares whose mean is 1."""
    found = np.ones(num_ranks) if shares is None else np.array(shares, np.float64)
    return found * num_ranks / found.sum()


def _checked_loads(tokens: Sequence[float], num_experts: int) -> Loads:
    loads = np.asarray(tokens, np.float64)
    if loads.shape != (num_experts,):
        raise ConfigError(f"a load must have a number of tokens for each of {num_experts} experts, got {len(tokens)}")
    return loads


def slot_counts(num_experts: int, num_redundant: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Return the slots of each rank: for all experts and `num_redundant` copies, divided by shares.

    Raises ConfigError with fewer experts than ranks, or more copies than the ranks have room for.
    """
    num_ranks = len(shares)
    if num_experts < num_ranks:
        raise ConfigError(
            f"tensor_parallel_size must be at most {num_experts} with enable_expert_parallel, as a layer has {num_experts} "
            f"experts and each rank needs at least one; got {num_ranks}"
        )
    counts = shard_sizes(num_experts + num_redundant, shares)
    if max(counts) > num_experts:
        most = _most_redundant(num_experts, shares)
        raise ConfigError(
            f"num_redundant_experts must be at most {most} for {num_experts} experts on {num_ranks} ranks, as a rank holds no "
            f"expert twice; got {num_redundant}"
        )
    return counts


def _most_redundant(num_experts: int, shares: Sequence[float]) -> int:
    """Return the largest number of copies with which no rank has more slots than there are experts."""
    return max(
        count
        for count in range(num_experts * (len(shares) - 1) + 1)
        if count == 0 or max(shard_sizes(num_experts + count, shares)) <= num_experts
    )


def linear_placement(num_experts: int, counts: Sequence[int]) -> ExpertPlacement:
    """Return consecutive experts for each rank, by its number of slots; after the last expert they start over, as copies."""
    ranks: list[tuple[int, ...]] = []
    first = 0
    for count in counts:
        ranks.append(tuple((first + index) % num_experts for index in range(count)))
        first += count
    return ExpertPlacement(num_experts, tuple(ranks))
