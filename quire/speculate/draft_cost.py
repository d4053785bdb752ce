"""DraftCost: how many times as long as a plain one a step of several sequences with drafts takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from quire.speculate.step_times import FEW_NOTED, RecentMedian

_FIRST_SLOPE = 0.05
_CLASS_BITS = 3
"""Numbers up to 7 are classes of their own; then two, four, ... are in one."""


@dataclass(slots=True)
class _Class:
    """Steps with about as many drafts: the mean of their numbers, and what they took."""

    num_drafts: float = 0.0
    ratio: RecentMedian = field(default_factory=RecentMedian)

    def note(self, num_drafts: int, ratio: float) -> None:
        self.ratio.note(ratio)
        self.num_drafts += (num_drafts - self.num_drafts) / self.ratio.num_recent


class DraftCost:
    """Ratios by the number of drafts: on lines through those that were noted, and through 1 where there are none.

    Every class of numbers keeps what was measured there: no line through all would, while for long only few are drafted.
    Before anything is known a draft costs next to nothing, so that it is tried.
    """

    def __init__(self, num_sequences: int) -> None:
        self._first_slope = _FIRST_SLOPE / num_sequences
        self._classes: dict[int, _Class] = {}
        self._line: list[tuple[float, float]] | None = None  # what `ratio` is read from, until the next note

    def note(self, num_drafts: int, ratio: float) -> None:
        """Take in a step."""
        self._line = None
        self._classes.setdefault(size_class(num_drafts, _CLASS_BITS), _Class()).note(num_drafts, ratio)

    def is_known(self, num_drafts: int) -> bool:
        """Whether a few steps with about as many drafts were noted."""
        known = self._classes.get(size_class(num_drafts, _CLASS_BITS))
        return known is not None and known.ratio.count >= FEW_NOTED

    def ratio(self, num_drafts: int) -> float:
        """Return the estimate, at least 1."""
        line = self._line
        if line is None:
            line = self._line = self._rising_line()
        for (left, low), (right, high) in pairwise(line):
            if num_drafts <= right:
                return low + (high - low) * (num_drafts - left) / (right - left)
        last, ratio = line[-1]
        slope = (ratio - 1.0) / last if last > 0 else self._first_slope
        return ratio + slope * (num_drafts - last)

    def _rising_line(self) -> list[tuple[float, float]]:
        """Return points, from none and 1 on: more drafts never take less, so that those which seem to are put together."""
        points: list[tuple[float, float, int]] = []  # number, ratio and weight
        for one in sorted(self._classes.values(), key=lambda one: one.num_drafts):
            number, ratio, weight = one.num_drafts, max(1.0, one.ratio.value), one.ratio.num_recent
            while points and points[-1][1] > ratio:
                number_before, ratio_before, weight_before = points.pop()
                share = weight_before / (weight_before + weight)
                number += share * (number_before - number)
                ratio += share * (ratio_before - ratio)
                weight += weight_before
            points.append((number, ratio, weight))
        return [(0.0, 1.0), *((number, ratio) for number, ratio, _ in points)]


def size_class(number: int, num_bits: int) -> int:
    """Return what stands for a number and those near it: the number without all but its first bits."""
    shift = max(0, number.bit_length() - num_bits)
    return number >> shift << shift
