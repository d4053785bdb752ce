"""Balance experts over ranks by their load: `place` from nothing, `improve` with few changes. Pure functions.

The load of an expert is its number of tokens; ranks that hold copies of it divide these. A rank's load is divided by its share.
Results depend only on the arguments, so that all processes that compute one get the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import ConfigError, InvariantError
from quire.parallel.expert_placement import ExpertPlacement, Loads, relative_shares

MAX_IMBALANCE = 1.05
"""`improve` stops when max/mean is at most this."""

_LEAST_GAIN = 1e-9
"""Of a change of `improve`, as a part of the mean load: smaller ones are rounding."""


@dataclass(frozen=True, slots=True)
class Move:
    """One slot of a rank gets another expert: `old` is dropped and `new` is loaded."""

    rank: int
    old: int
    new: int


def place(
    tokens: Sequence[float],
    counts: Sequence[int],
    shares: Sequence[float] | None = None,
    num_hosts: int = 1,
    pairs: NDArray[np.int64] | None = None,
) -> ExpertPlacement:
    """Return a placement that balances the load of the ranks.

    tokens  of each expert
    counts  slots of each rank; together at least one for each expert, and none has more slots than there are experts
    shares  relative speed of each rank; None: equal
    num_hosts, pairs  as many consecutive ranks are on each host; [E, E] tokens that chose both experts, symmetric. Those that
            are chosen together are then placed on one host, as far as the hosts' loads stay within MAX_IMBALANCE

    Slots in excess of the experts become copies of those with the largest load for each copy. Then the heaviest are placed
    first, each on the rank with the least load.
    """
    loads = np.asarray(tokens, np.float64)
    if sum(counts) < len(loads) or max(counts) > len(loads):
        raise ConfigError(f"{len(loads)} experts need at least as many slots, and no rank more than that; got {tuple(counts)}")
    copies = _choose_copies(loads, counts)
    speeds = relative_shares(shares, len(counts))
    found = _place_heaviest_first(loads / copies, copies, counts, speeds)
    if num_hosts > 1 and pairs is not None:
        found = _gather_pairs(found, loads / copies, pairs / np.outer(copies, copies), speeds, num_hosts)
    return ExpertPlacement(len(loads), tuple(tuple(sorted(experts)) for experts in found))


def _choose_copies(loads: Loads, counts: Sequence[int]) -> NDArray[np.int64]:
    """Return how many copies each expert gets."""
    copies = np.ones(len(loads), np.int64)
    for added in range(sum(counts) - len(loads)):
        num_left = sum(counts) - len(loads) - added - 1
        for expert in np.argsort(-loads / copies, kind="stable"):
            if copies[expert] == len(counts):
                continue
            copies[expert] += 1
            if _is_placeable(copies, num_left, counts):
                break
            copies[expert] -= 1
        else:
            raise InvariantError(f"no expert of {copies.tolist()} can have another copy on ranks of {tuple(counts)} slots")
    return copies


def _is_placeable(copies: NDArray[np.int64], num_left: int, counts: Sequence[int]) -> bool:
    """Return whether these copies, and `num_left` more, can fill ranks of so many slots without an expert twice on one: the
    theorem of Gale and Ryser, with the remaining copies spread as evenly as possible."""
    if max(counts) - min(counts) <= 1:
        return True
    spread = np.sort(copies)
    for _ in range(num_left):
        spread[0] += 1
        spread.sort()
    if spread[-1] > len(counts):
        return False
    largest = np.cumsum(sorted(counts, reverse=True))
    room = [np.minimum(spread, num_ranks).sum() for num_ranks in range(1, len(counts) + 1)]
    return bool(np.all(largest <= room))


def _place_heaviest_first(loads: Loads, copies: NDArray[np.int64], counts: Sequence[int], speeds: Loads) -> list[set[int]]:
    """Return the experts of each rank; loads: of one copy of each expert."""
    ranks: list[set[int]] = [set() for _ in counts]
    totals = np.zeros(len(counts))
    for expert in np.argsort(-loads, kind="stable").tolist():
        for _ in range(int(copies[expert])):
            open_ranks = [rank for rank, own in enumerate(ranks) if len(own) < counts[rank] and expert not in own]
            if not open_ranks:
                if not _make_room(expert, ranks, counts, totals, loads):
                    return _place_by_room(loads, copies, counts, speeds)
                continue
            best = min(open_ranks, key=lambda rank: ((totals[rank] + loads[expert]) / speeds[rank], rank))
            ranks[best].add(expert)
            totals[best] += loads[expert]
    return ranks


def _gather_pairs(
    ranks: list[set[int]], loads: Loads, pairs: NDArray[np.float64], speeds: Loads, num_hosts: int
) -> list[set[int]]:
    """Exchange experts between hosts, always the two that bring the most pairs together (Kernighan and Lin, 1970), then place
    those of each host on its ranks."""
    size = len(check_hosts(len(ranks), num_hosts))
    held = np.zeros((num_hosts, len(loads)), np.int64)  # copies of each expert on each host
    for rank, own in enumerate(ranks):
        held[rank // size, list(own)] += 1
    host_speeds, affinity = speeds.reshape(num_hosts, size).sum(1), pairs - np.diag(np.diag(pairs))
    ceiling = max(float((held @ loads / host_speeds).max()), MAX_IMBALANCE * float((held @ loads).sum() / host_speeds.sum()))
    for _ in range(len(loads) * num_hosts):
        near, totals = affinity @ held.T, held @ loads
        best, gain = (0, 0, 0, 0), _LEAST_GAIN * affinity.sum()
        for one, other in itertools.combinations(range(num_hosts), 2):
            given, taken = (np.flatnonzero((held[a] > 0) & (held[b] == 0)) for a, b in ((one, other), (other, one)))
            if not len(given) or not len(taken):
                continue
            moved = loads[given][:, None] - loads[taken]
            gains = (near[given, other] - near[given, one])[:, None] + near[taken, one] - near[taken, other]
            gains -= 2 * affinity[np.ix_(given, taken)]
            peaks = np.maximum((totals[one] - moved) / host_speeds[one], (totals[other] + moved) / host_speeds[other])
            gains[peaks > ceiling] = -np.inf
            i, j = (int(at) for at in np.unravel_index(gains.argmax(), gains.shape))
            if gains[i, j] > gain:
                best, gain = (one, int(given[i]), other, int(taken[j])), float(gains[i, j])
        one, a, other, b = best
        if one == other:
            break
        held[one, a], held[one, b], held[other, a], held[other, b] = held[one, a] - 1, 1, 1, held[other, b] - 1
    found: list[set[int]] = []
    for host, copies in enumerate(held):
        own = slice(host * size, (host + 1) * size)
        found += _place_heaviest_first(loads, copies, [len(each) for each in ranks[own]], speeds[own])
    return found


def check_hosts(num_ranks: int, num_hosts: int) -> range:
    """Return the ranks of the first host. Raises ConfigError where hosts have unequal numbers of ranks."""
    if num_hosts < 1 or num_ranks % num_hosts:
        raise ConfigError(f"the number of hosts must divide the {num_ranks} ranks, got {num_hosts}")
    return range(num_ranks // num_hosts)


def _make_room(expert: int, ranks: list[set[int]], counts: Sequence[int], totals: Loads, loads: Loads) -> bool:
    """Put an expert on a full rank, one of whose experts moves to a rank with room, which has this one already."""
    for to in (rank for rank, own in enumerate(ranks) if len(own) < counts[rank]):
        for giver in (rank for rank, own in enumerate(ranks) if expert not in own):
            movable = sorted(ranks[giver] - ranks[to], key=lambda other: (abs(loads[other] - loads[expert]), other))
            if not movable:
                continue
            ranks[giver].remove(movable[0])
            ranks[giver].add(expert)
            ranks[to].add(movable[0])
            totals[giver] += loads[expert] - loads[movable[0]]
            totals[to] += loads[movable[0]]
            return True
    return False


def _place_by_room(loads: Loads, copies: NDArray[np.int64], counts: Sequence[int], speeds: Loads) -> list[set[int]]:
    """As _place_heaviest_first, but on the ranks with the most room: finds a placement if there is one."""
    ranks: list[set[int]] = [set() for _ in counts]
    totals = np.zeros(len(counts))
    for expert in sorted(range(len(loads)), key=lambda each: (-copies[each], -loads[each], each)):
        by_room = sorted(
            range(len(counts)), key=lambda rank: (len(ranks[rank]) - counts[rank], totals[rank] / speeds[rank], rank)
        )
        for rank in by_room[: copies[expert]]:
            ranks[rank].add(expert)
            totals[rank] += loads[expert]
    if any(len(own) != count for own, count in zip(ranks, counts, strict=True)):
        raise InvariantError(f"copies {copies.tolist()} do not fit ranks of {tuple(counts)} slots")
    return ranks


def improve(
    placement: ExpertPlacement,
    tokens: Sequence[float],
    shares: Sequence[float] | None = None,
    limit: float = MAX_IMBALANCE,
    max_moves: int = 20,
    num_hosts: int = 1,
) -> list[Move]:
    """Return the moves that bring max/mean to `limit`, or as near as `max_moves` of them can; see improve_changes."""
    return [move for change in improve_changes(placement, tokens, shares, limit, max_moves, num_hosts) for move in change]


def improve_changes(
    placement: ExpertPlacement,
    tokens: Sequence[float],
    shares: Sequence[float] | None = None,
    limit: float = MAX_IMBALANCE,
    max_moves: int = 20,
    num_hosts: int = 1,
) -> list[list[Move]]:
    """Return the changes that bring max/mean to `limit`, or as near as `max_moves` moves can. After each of them every expert
    has a slot.

    Each change takes load from the busiest rank: a slot of an expert with several copies gets a copy of one of its experts (one
    move), or it exchanges an expert with another rank (two moves). The change that leaves the least larger load of the ranks
    involved is made, if that is less than before. With num_hosts, see `place`, experts stay on their hosts as long as a change
    within the busiest rank's host helps.
    """
    speeds = relative_shares(shares, len(placement.ranks))
    state = _BalanceState(placement, np.asarray(tokens, np.float64), speeds, len(check_hosts(len(speeds), num_hosts)))
    changes: list[list[Move]] = []
    num_left = max_moves
    while num_left > 0 and state.imbalance() > limit:
        change = state.best_change(num_left)
        if not change:
            break
        state.apply(change)
        changes.append(change)
        num_left -= len(change)
    return changes


def apply_moves(placement: ExpertPlacement, moves: Sequence[Move]) -> ExpertPlacement:
    """Return a placement after some changes."""
    ranks = [set(experts) for experts in placement.ranks]
    for move in moves:
        if move.old not in ranks[move.rank] or move.new in ranks[move.rank]:
            raise InvariantError(f"{move} does not fit rank {move.rank}, which has {sorted(ranks[move.rank])}")
        ranks[move.rank].remove(move.old)
        ranks[move.rank].add(move.new)
    return ExpertPlacement(placement.num_experts, tuple(tuple(sorted(experts)) for experts in ranks))


class _BalanceState:
    """A placement while `improve` changes it: has[rank, expert], and the load of each rank, divided by its speed.

    host_size  consecutive ranks that are on one host
    """

    def __init__(self, placement: ExpertPlacement, loads: Loads, speeds: Loads, host_size: int) -> None:
        self.loads, self.speeds, self.host_size = loads, speeds, host_size
        self.has = np.zeros((len(placement.ranks), placement.num_experts), bool)
        for rank, experts in enumerate(placement.ranks):
            self.has[rank, list(experts)] = True

    def _rank_loads(self, has: NDArray[np.bool_]) -> Loads:
        return (has @ (self.loads / has.sum(0))) / self.speeds

    def imbalance(self) -> float:
        """Return max/mean."""
        mean = self.loads.sum() / len(self.speeds)
        return float(self._rank_loads(self.has).max() / mean) if mean > 0 else 1.0

    def apply(self, change: Sequence[Move]) -> None:
        """Make a change."""
        for move in change:
            self.has[move.rank, move.old], self.has[move.rank, move.new] = False, True

    def best_change(self, max_moves: int) -> list[Move]:
        """Return the best next change; empty: none is better than what there is."""
        current = self._rank_loads(self.has)
        busiest, mean = int(current.argmax()), self.loads.sum() / len(self.speeds)
        first = busiest - busiest % self.host_size
        for ranks in (range(first, first + self.host_size), range(len(self.speeds))):
            best, peak = self._best_copy(busiest, ranks)
            if max_moves >= 2:
                swap, swap_peak = self._best_swap(busiest, current, ranks)
                if swap_peak < peak:
                    best, peak = swap, swap_peak
            if peak < current[busiest] - _LEAST_GAIN * mean:
                return best
        return []

    def _best_swap(self, busiest: int, current: Loads, ranks: range) -> tuple[list[Move], float]:
        """Return the best exchange of an expert of the busiest rank with another rank, and the larger load of both after it."""
        each = self.loads / self.has.sum(0)
        own = np.flatnonzero(self.has[busiest])
        best, peak = list[Move](), float("inf")
        for rank in ranks:
            given = own[~self.has[rank, own]]
            taken = np.flatnonzero(self.has[rank] & ~self.has[busiest])
            if rank == busiest or not len(given) or not len(taken):
                continue
            moved = each[given][:, None] - each[taken][None, :]
            peaks = np.maximum(current[busiest] - moved / self.speeds[busiest], current[rank] + moved / self.speeds[rank])
            found = float(peaks.min())
            if found < peak:
                i, j = (int(index) for index in np.unravel_index(peaks.argmin(), peaks.shape))
                a, b = int(given[i]), int(taken[j])
                best, peak = [Move(busiest, a, b), Move(rank, b, a)], found
        return best, peak

    def _best_copy(self, busiest: int, ranks: range) -> tuple[list[Move], float]:
        """Return the best replacement of a copy by one of an expert of the busiest rank, and the largest load after it."""
        copies = self.has.sum(0)
        best, peak = list[Move](), float("inf")
        for rank in ranks:
            wanted = np.flatnonzero(self.has[busiest] & ~self.has[rank])
            for old in np.flatnonzero(self.has[rank] & (copies > 1)).tolist():
                for new in wanted.tolist():
                    has = self.has.copy()
                    has[rank, old], has[rank, new] = False, True
                    found = float(self._rank_loads(has).max())
                    if found < peak:
                        best, peak = [Move(rank, old, new)], found
        return best, peak
