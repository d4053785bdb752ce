"""StepCosts: measured durations of steps without drafts, and relative durations of steps with drafts."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

_FEW = 4
"""Number of measurements after which a time is considered known."""


@dataclass(slots=True)
class _Measured:
    """Trimmed mean of the last log durations, and mean of their numbers of drafts."""

    recent: deque[float] = field(default_factory=lambda: deque[float](maxlen=15))
    value: float = 0.0
    num_drafts: float = 0.0
    count: int = 0

    def note(self, value: float, num_drafts: int = 0) -> None:
        self.recent.append(value)
        self.count += 1
        self.num_drafts += (num_drafts - self.num_drafts) / len(self.recent)
        ranked = sorted(self.recent)
        cut = (len(ranked) - 1) // 3
        self.value = sum(ranked[cut : len(ranked) - cut]) / (len(ranked) - 2 * cut)


class StepCosts:
    """Durations of plain steps, and of steps with drafts relative to plain steps, by batch size and number of drafts.

    The machine's speed is one `level`, which every step adjusts a little. A ratio is measured only shortly after plain steps or
    in a probe, because a machine that slows down later slows all steps alike.
    """

    def __init__(self) -> None:
        self.level = 0.0
        self._plain: dict[int, _Measured] = {}
        self._ratios: dict[int, dict[int, _Measured]] = {}
        self._lines: dict[int, list[tuple[float, float]]] = {}
        self._catch_up_s = 0.0  # of a token

    def plain_s(self, num_sequences: int) -> float | None:
        """Return the current duration of a plain step; None after too few measurements."""
        plain = self._plain.get(size_class(num_sequences))
        return None if plain is None or plain.count < _FEW else math.exp(self.level + plain.value)

    def note_plain(self, num_sequences: int, duration_s: float) -> None:
        """Record a step without drafts."""
        value = math.log(max(duration_s, 1e-9))
        if not self._plain:
            self.level = value
        plain = self._plain.setdefault(size_class(num_sequences), _Measured())
        if plain.count < _FEW:
            plain.note(value - self.level)
        else:
            self._follow(value - plain.value)

    def note(self, num_sequences: int, num_drafts: int, duration_s: float, *, measures: bool) -> None:
        """Record a step in which drafting was enabled. measures: whether it updates the ratio; else it updates the level."""
        batch = size_class(num_sequences)
        relative = math.log(max(duration_s, 1e-9)) - self._plain[batch].value
        ratio = self._ratios.setdefault(batch, {}).setdefault(size_class(num_drafts), _Measured())
        if measures or ratio.count < _FEW:
            ratio.note(relative - self.level, num_drafts)
            self._lines.pop(batch, None)
        else:
            self._follow(relative - ratio.value)

    def _follow(self, level: float) -> None:
        self.level += 0.2 * min(max(level - self.level, -0.2), 0.2)

    def note_catch_up(self, num_sequences: int, extra_s: float, num_tokens: int) -> float:
        """Record the time that catching up with num_tokens took, and return it in plain steps."""
        self._catch_up_s += (extra_s / num_tokens - self._catch_up_s) * (0.2 if self._catch_up_s > 0 else 1.0)
        return extra_s / (self.plain_s(num_sequences) or extra_s or 1.0)

    def catch_up(self, num_sequences: int, num_tokens: int) -> float:
        """Return the usual cost of catching up with num_tokens, in plain steps."""
        return num_tokens * self._catch_up_s / (self.plain_s(num_sequences) or math.inf)

    def usual(self, num_sequences: int, num_drafts: int) -> float | None:
        """Return the relative duration of a step with about num_drafts drafts; None after too few measurements."""
        known = self._ratios.get(size_class(num_sequences), {}).get(size_class(num_drafts))
        return None if known is None or known.count < _FEW else self.ratio(num_sequences, num_drafts)

    def ratio(self, num_sequences: int, num_drafts: int) -> float:
        """Return the relative duration of a step with num_drafts drafts, interpolated between measurements. Numbers that were
        never measured are assumed to be cheap, so that they are tried."""
        batch = size_class(num_sequences)
        line = self._lines.get(batch) or self._draw_line(batch)
        for (left, low), (right, high) in pairwise(line):
            if num_drafts <= right:
                return low + (high - low) * (num_drafts - left) / (right - left)
        last, ratio = line[-1]
        slope = (ratio - 1.0) / last if last > 0 else 0.05 / num_sequences
        return ratio + slope * (num_drafts - last)

    def _draw_line(self, batch: int) -> list[tuple[float, float]]:
        known = sorted((one.num_drafts, max(1.0, math.exp(one.value))) for one in self._ratios.get(batch, {}).values())
        line = self._lines[batch] = known if known and known[0][0] == 0 else [(0.0, 1.0), *known]
        return line


def size_class(number: int) -> int:
    """Return the size class of a number: the number with all but its three most significant bits cleared."""
    shift = max(0, number.bit_length() - 3)
    return number >> shift << shift
