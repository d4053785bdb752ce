"""Plan where experts are, from files of loads and placements, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import ConfigError
from quire.parallel.expert_balance import apply_moves, check_hosts, improve, place
from quire.parallel.expert_files import read_loads, read_pairs, read_placements, write_placements
from quire.parallel.expert_placement import ExpertPlacement, linear_placement, slot_counts


@dataclass(frozen=True, slots=True)
class LayerBalance:
    """One layer: max/mean of the ranks' loads before and after, and the slots that get another expert.

    before  of linear placement, or of the placement that is improved
    pairs_before, pairs_after  share of the pairs of a token's experts that are on one host; None: hosts are not considered
    """

    layer: int
    before: float
    after: float
    num_moves: int
    num_slots: int
    pairs_before: float | None = None
    pairs_after: float | None = None


def place_experts(
    load: str, num_redundant: int, shares: Sequence[float], output: str, num_hosts: int = 1
) -> list[LayerBalance]:
    """Write a placement that balances a load; num_hosts: see `place`. Raises ConfigError."""
    found: dict[int, ExpertPlacement] = {}
    lines: list[LayerBalance] = []
    check_hosts(len(shares), num_hosts)
    loads = read_loads(load)
    pairs = read_pairs(load, loads) if num_hosts > 1 else {}
    for layer, tokens in loads.items():
        counts = slot_counts(len(tokens), num_redundant, shares)
        of_layer = num_hosts, pairs.get(layer)
        before, after = linear_placement(len(tokens), counts), place(tokens, counts, shares, *of_layer)
        found[layer] = after
        lines.append(_compare(layer, before, after, tokens, shares, *of_layer))
    write_placements(output, found)
    return lines


def improve_experts(
    load: str,
    placement: str,
    shares: Sequence[float] | None,
    limit: float,
    max_moves: int,
    output: str,
    num_hosts: int = 1,
) -> list[LayerBalance]:
    """Write a placement that balances a load better than another one, and differs from it in few slots. Raises ConfigError."""
    loads = read_loads(load)
    pairs = read_pairs(load, loads) if num_hosts > 1 else {}
    found: dict[int, ExpertPlacement] = {}
    lines: list[LayerBalance] = []
    for layer, before in read_placements(placement, {layer: len(tokens) for layer, tokens in loads.items()}).items():
        if shares is not None and len(shares) != len(before.ranks):
            raise ConfigError(
                f"tensor_parallel_shares must have one number for each of the {len(before.ranks)} ranks of {placement}, got "
                f"{len(shares)}"
            )
        found[layer] = apply_moves(before, improve(before, loads[layer], shares, limit, max_moves, num_hosts))
        lines.append(_compare(layer, before, found[layer], loads[layer], shares, num_hosts, pairs.get(layer)))
    write_placements(output, found)
    return lines


def share_on_one_host(placement: ExpertPlacement, pairs: NDArray[np.int64], num_hosts: int) -> float:
    """Return the share of pairs [E, E] of different experts that some host holds both of; 1 without pairs."""
    size = len(check_hosts(len(placement.ranks), num_hosts))
    has = np.zeros((num_hosts, len(pairs)), bool)
    for rank, own in enumerate(placement.ranks):
        has[rank // size, list(own)] = True
    others = pairs - np.diag(np.diag(pairs))
    total = int(others.sum())
    return float((others * (has.T @ has)).sum() / total) if total else 1.0


def _compare(
    layer: int,
    before: ExpertPlacement,
    after: ExpertPlacement,
    tokens: Sequence[int],
    shares: Sequence[float] | None,
    num_hosts: int,
    pairs: NDArray[np.int64] | None,
) -> LayerBalance:
    moves = sum(len(set(new) - set(old)) for new, old in zip(after.ranks, before.ranks, strict=True))
    balance = before.imbalance(tokens, shares), after.imbalance(tokens, shares)
    both = (None, None) if pairs is None else (share_on_one_host(each, pairs, num_hosts) for each in (before, after))
    return LayerBalance(layer, *balance, moves, after.num_slots, *both)
