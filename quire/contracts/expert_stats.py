"""ExpertStats: how many tokens each expert of a mixture model has got, and how evenly the ranks share them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStats:
    """One layer; counts are since the start of the engine. A token counts once for each of its experts.

    layer        its index in the model
    tokens       of each expert
    rank_tokens  of each rank, where whole experts are placed on ranks; ranks with copies of an expert divide its tokens.
                 Otherwise empty
    imbalance    the largest of the ranks' tokens since the placement last changed, each relative to the rank's share, divided
                 by the mean; 1 without ranks or tokens
    imbalance_before, imbalance_after  of the last rebalancing: by the load of its window, with the placement that it found and
                 with the one that it planned; 0 before the first one
    num_moved    slots that have got another expert while the engine ran; num_failed_moves: those that could not be loaded
    num_overflowed, num_dropped  choices that expert_capacity_factor gave to another expert, or left out
    num_weak     choices that expert_min_share left out
    capacity_use demand of a step's busiest expert divided by the capacity; mean of about the last 100 steps
    """

    layer: int
    tokens: list[int]
    rank_tokens: list[float]
    imbalance: float = 1.0
    imbalance_before: float = 0.0
    imbalance_after: float = 0.0
    num_moved: int = 0
    num_failed_moves: int = 0
    num_overflowed: int = 0
    num_dropped: int = 0
    num_weak: int = 0
    capacity_use: float = 0.0
