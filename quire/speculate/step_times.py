"""StepTimes: how long steps of different kinds take beside each other, on a machine whose speed drifts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

Kind = tuple[str, int]

_LEVEL_GAIN = 0.2
FEW_NOTED, _MOST_RECENT = 4, 25
_MAX_LEVEL_ERROR = 0.2
_STEPS_IN_CONTRAST = 6


class RecentMedian:
    """The median of the last values that were noted, and how many were in all."""

    __slots__ = ("_recent", "count", "value")

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_MOST_RECENT)
        self.value, self.count = 0.0, 0

    @property
    def num_recent(self) -> int:
        """From how many values it stems."""
        return len(self._recent)

    def note(self, value: float) -> None:
        """Take in a value."""
        self._recent.append(value)
        ranked = sorted(self._recent)
        size = len(ranked)
        self.value = (ranked[(size - 1) // 2] + ranked[size // 2]) / 2
        self.count += 1


class StepTimes:
    """The logarithm of a step's time is a level, which follows the machine within a few steps, and an offset of its kind.

    Offsets move only while kinds alternate: a machine that slows down in the middle of equal steps slows them all alike. What
    delays a single step, be it another program, counts little.
    """

    def __init__(self) -> None:
        self._level = 0.0
        self._kinds: dict[Kind, RecentMedian] = {}  # logarithms of times beside the level
        self._last: Kind | None = None
        self._num_alike = 0

    def note(self, kind: Kind, duration_s: float) -> None:
        """Take in a step of a kind."""
        value = math.log(max(duration_s, 1e-9))
        known = self._kinds.get(kind)
        self._num_alike = self._num_alike + 1 if kind == self._last else 0
        self._last = kind
        if known is None:
            if not self._kinds:
                self._level = value
            self._kinds[kind] = RecentMedian()
            self._kinds[kind].note(value - self._level)
            return
        if known.count < FEW_NOTED or self._num_alike < _STEPS_IN_CONTRAST:
            known.note(value - self._level)
        self._follow(value - known.value)

    def follow(self, kind: Kind, duration_s: float) -> None:
        """Take in how long a step of a kind that is known would take now: of the machine's speed it tells, not of the kind."""
        self._follow(math.log(max(duration_s, 1e-9)) - self._kinds[kind].value)

    def pin(self, kind: Kind, duration_s: float) -> None:
        """Take in that steps of a kind that is known take so long now."""
        self._level = math.log(max(duration_s, 1e-9)) - self._kinds[kind].value

    def _follow(self, level: float) -> None:
        self._level += _LEVEL_GAIN * min(max(level - self._level, -_MAX_LEVEL_ERROR), _MAX_LEVEL_ERROR)

    def count(self, kind: Kind) -> int:
        """Return how many steps of a kind its time stems from."""
        known = self._kinds.get(kind)
        return 0 if known is None else known.count

    def usual_s(self, kind: Kind) -> float | None:
        """Return how long a step of a kind takes now; None where there was none."""
        known = self._kinds.get(kind)
        return None if known is None else math.exp(self._level + known.value)

    @property
    def kinds(self) -> list[Kind]:
        """The kinds that are known."""
        return list(self._kinds)


def ratios_of_one(times: StepTimes, made_rates: Sequence[float]) -> list[float]:
    """Return how many plain steps long a step of one sequence is, by the number of drafts that are asked for, from 0 on.

    times       of the kinds ("plain", 1) and ("drafts", number that are made)
    made_rates  how often the draft at each depth is made, where it is asked for and the one before it was made
    """
    plain_s = times.usual_s(("plain", 1)) or 1.0
    known = {0: 1.0}
    for name, count in times.kinds:
        usual_s = times.usual_s((name, count))
        if name == "drafts" and count >= 0 and usual_s is not None:
            known[count] = usual_s / plain_s
    # The chance that just so many are made, times what they take.
    ratios: list[float] = []
    before, is_made = 0.0, 1.0
    for value, rate in zip(_on_lines(known, len(made_rates)), [*made_rates, 0.0], strict=True):
        ratios.append(before + is_made * value)
        before += is_made * (1.0 - rate) * value
        is_made *= rate
    return ratios


def _on_lines(known: dict[int, float], most: int) -> list[float]:
    """Return the values of 0, which is known, to `most`; others are on the line between the nearest that are known."""
    values: list[float] = []
    counts = sorted(known)
    for below, above in pairwise(counts):
        slope = (known[above] - known[below]) / (above - below)
        values += [known[below] + slope * (count - below) for count in range(below, above)]
    # As if a token took a twentieth of the step: little enough that it is tried, and then it is known.
    last = counts[-1]
    return values + [known[last] * (1 + 0.05 * (count - last)) for count in range(last, most + 1)]
