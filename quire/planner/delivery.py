"""Delivery: what a server adds to the times of the engine's steps, as its clients see them."""

from __future__ import annotations

import bisect
import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NUM_NEAREST = 16
_MIN_IDLE_S = 1e-3


@dataclass(frozen=True, slots=True)
class Delivery:
    """Samples of requests that were alone at a server, at least one of each kind, and what steps take longer there.

    delays    (idle_s, delay_s), ascending: how long the server had nothing to do before a request, and by how much its time to
              the first token was longer than the steps of its prompt. After a pause processes have to wake and caches are cold
    stalls    (idle_s, samples), ascending: for pauses of about so long before a request, by how much the times between its
              tokens were longer than their median; 0 for at least half of them
    step_s, sequence_s  by how much a step takes longer at a server, and for each of its sequences: tokens are handed over,
              and other processes want the same cores and caches
    """

    delays: tuple[tuple[float, float], ...]
    stalls: tuple[tuple[float, tuple[float, ...]], ...]
    step_s: float = 0.0
    sequence_s: float = 0.0

    @classmethod
    def from_dict(cls, figures: Mapping[str, Any]) -> Delivery:
        """Return the samples that asdict wrote. Raises KeyError, TypeError or ValueError for other dicts."""
        delays = sorted((float(idle_s), float(delay_s)) for idle_s, delay_s in figures["delays"])
        stalls = sorted((float(idle_s), tuple(float(value) for value in samples)) for idle_s, samples in figures["stalls"])
        if not delays or not stalls or not all(samples for _, samples in stalls):
            raise ValueError("delivery has no samples")
        return cls(tuple(delays), tuple(stalls), float(figures["step_s"]), float(figures["sequence_s"]))

    @property
    def least_delay_s(self) -> float:
        """The shortest delay."""
        return min(delay_s for _, delay_s in self.delays)

    @property
    def median_delay_s(self) -> float:
        """The median of all delays."""
        return statistics.median(delay_s for _, delay_s in self.delays)

    def draw_delay(self, idle_s: float, rng: random.Random) -> float:
        """Return the delay of one of the requests whose pause before was the nearest to idle_s."""
        place = bisect.bisect_left(self.delays, (idle_s, 0.0))
        start = max(0, min(place - _NUM_NEAREST // 2, len(self.delays) - _NUM_NEAREST))
        return rng.choice(self.delays[start : start + _NUM_NEAREST])[1]

    def draw_stall(self, idle_s: float, rng: random.Random) -> float:
        """Return the stall of the tokens of one step; idle_s: the pause before, 0 where many steps have followed it."""
        wanted = math.log(max(idle_s, _MIN_IDLE_S))
        _, samples = min(self.stalls, key=lambda one: abs(math.log(max(one[0], _MIN_IDLE_S)) - wanted))
        return rng.choice(samples)

    def describe(self) -> str:
        """Return the samples for people."""
        stalls = sorted(value for _, samples in self.stalls for value in samples)
        late = stalls[min(len(stalls) - 1, int(0.99 * len(stalls)))]
        return (
            f"{len(self.delays)} requests to the server: time to the first token {self.median_delay_s * 1e3:.2f} ms longer "
            f"than the steps (median), steps {self.step_s * 1e3:.3f} ms longer and {self.sequence_s * 1e3:.3f} ms for each "
            f"sequence, 1% of tokens more than {late * 1e3:.2f} ms late"
        )
