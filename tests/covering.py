"""Which combinations of a test's parameters run by default: enough that each value, or each pair of values, occurs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

import pytest

Combination = Mapping[str, Hashable]
Item = TypeVar("Item")


def covering(rows: Sequence[Combination], strength: int = 1) -> list[int]:
    """Return the indices of rows that together have each combination of `strength` values that any row has.

    rows      values by parameter; every row has the same parameters
    strength  1 covers each value of each parameter, 2 each pair of values of two parameters
    Returns   indices in ascending order, chosen greedily: few, but not always the fewest
    """
    parts = [set(_parts(row, strength)) for row in rows]
    missing, chosen = set().union(*parts), []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(parts[index] & missing))
        chosen.append(best)
        missing -= parts[best]
    return sorted(chosen)


def _parts(row: Combination, strength: int) -> Iterator[tuple[tuple[str, Hashable], ...]]:
    """Yield what a row covers; parameters that are too few for the strength count as one combination."""
    return combinations(sorted(row.items()), min(strength, len(row)))


def _row(item: pytest.Function) -> Combination:
    """Return what a test's id names for each `parametrize` and fixture: callspec.indices counts the combinations instead."""
    return {str(place): name for place, name in enumerate(item.callspec._idlist)}


def mark_slow_combinations(items: list[pytest.Item], keeps_all: bool = False) -> list[pytest.Item]:
    """Mark as slow what the markers `covering` and `one_in` leave out of the default run; return what never runs.

    covering(strength=1)  the quick combinations have each value (2: each pair of values) of the parameters; of the others,
                          and of those that are slow anyway, as many are slow as have each value once more
    one_in(n)             one in n of the combinations is quick, the others are slow: for a long list of cases of the same kind
    keep=False            the other combinations never run, but for those that are slow anyway
    keeps_all             every other combination is slow, but for those that keep=False leaves out
    """
    groups: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and any(item.get_closest_marker(name) for name in ("covering", "one_in")):
            groups.setdefault(item.nodeid.split("[")[0], []).append(item)
    never = []
    for group in groups.values():
        slow = [item for item in group if item.get_closest_marker("slow")]
        quick = [item for item in group if not item.get_closest_marker("slow")]
        covered = group[0].get_closest_marker("covering")
        marker = covered or group[0].get_closest_marker("one_in")
        assert marker is not None
        strength = marker.kwargs.get("strength", 1)
        chosen = range(0, len(quick), marker.args[0]) if covered is None else covering([_row(item) for item in quick], strength)
        others = [item for index, item in enumerate(quick) if index not in set(chosen)]
        if marker.kwargs.get("keep", True):
            slow += others
        else:
            never += others
        for item in slow:
            item.add_marker(pytest.mark.slow)
        if covered is not None and not keeps_all:
            kept = set(covering([_row(item) for item in slow], strength))
            never += [item for index, item in enumerate(slow) if index not in kept]
    return never


def redundant_slow_combinations(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the slow combinations of each test that are not needed for every value of its parameters to occur among them.

    For tests that take far longer where they have to be simulated, such as those of GPU kernels in an interpreter.
    """
    groups: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker("slow"):
            groups.setdefault(item.nodeid.split("[")[0], []).append(item)
    redundant = []
    for group in groups.values():
        needed = set(covering([_row(item) for item in group]))
        redundant += [item for index, item in enumerate(group) if index not in needed]
    return redundant


def part_of(items: Sequence[Item], part: str) -> Sequence[Item]:
    """Return the part "i/n" of tests: each n-th from the i-th on, i < n."""
    first, count = map(int, part.split("/"))
    return items[first::count]
