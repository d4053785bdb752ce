"""Plan where experts are, from files of loads and placements, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.parallel.expert_balance import apply_moves, improve, place
from quire.parallel.expert_files import read_loads, read_placements, write_placements
from quire.parallel.expert_placement import ExpertPlacement, linear_placement, slot_counts


@dataclass(frozen=True, slots=True)
class LayerBalance:
    """One layer: max/mean of the ranks' loads before and after, and the slots that get another expert.

    before  of linear placement, or of the placement that is improved
    """

    layer: int
    before: float
    after: float
    num_moves: int
    num_slots: int


def place_experts(load: str, num_redundant: int, shares: Sequence[float], output: str) -> list[LayerBalance]:
    """Write a placement that balances a load. Raises ConfigError."""
    found: dict[int, ExpertPlacement] = {}
    lines: list[LayerBalance] = []
    for layer, tokens in read_loads(load).items():
        counts = slot_counts(len(tokens), num_redundant, shares)
        before, after = linear_placement(len(tokens), counts), place(tokens, counts, shares)
        found[layer] = after
        lines.append(_compare(layer, before, after, tokens, shares))
    write_placements(output, found)
    return lines


def improve_experts(
    load: str, placement: str, shares: Sequence[float] | None, limit: float, max_moves: int, output: str
) -> list[LayerBalance]:
    """Write a placement that balances a load better than another one, and differs from it in few slots. Raises ConfigError."""
    loads = read_loads(load)
    found: dict[int, ExpertPlacement] = {}
    lines: list[LayerBalance] = []
    for layer, before in read_placements(placement, {layer: len(tokens) for layer, tokens in loads.items()}).items():
        if shares is not None and len(shares) != len(before.ranks):
            raise ConfigError(
                f"tensor_parallel_shares must have one number for each of the {len(before.ranks)} ranks of {placement}, got "
                f"{len(shares)}"
            )
        found[layer] = apply_moves(before, improve(before, loads[layer], shares, limit, max_moves))
        lines.append(_compare(layer, before, found[layer], loads[layer], shares))
    write_placements(output, found)
    return lines


def _compare(
    layer: int, before: ExpertPlacement, after: ExpertPlacement, tokens: Sequence[int], shares: Sequence[float] | None
) -> LayerBalance:
    moves = sum(len(set(new) - set(old)) for new, old in zip(after.ranks, before.ranks, strict=True))
    return LayerBalance(layer, before.imbalance(tokens, shares), after.imbalance(tokens, shares), moves, after.num_slots)
