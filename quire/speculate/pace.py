"""Pace: how many tokens to draft, from what drafts have cost and gained so far.

A step of T tokens takes t(T). A sequence that decodes gains one token in it, and with drafts also those that are accepted.
Drafts are ranked by the probability that they are accepted, and as many are taken as make tokens per second highest. When none
pay, nothing is even looked for during a sleep, which doubles each time up to a limit: what the trials between cost is below a
hundredth then. Nothing here changes a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from quire.speculate.records import AcceptanceRecord

_NEEDED_GAIN = 1.03
_EVER = 0.98
_FIRST_SLEEP, _LONGEST_SLEEP = 32, 1024
_STEPS_BETWEEN_PLAIN = 96
_FEW_PLAIN = 2
_STEPS_BETWEEN_FLOORS = 8
_CHEAP_RANKING = 32
_FLOOR_SLACK = 0.9


class StepTimes:
    """How long recent steps of so many tokens took, in seconds.

    It is their lower quartile: what delays one now and then is not what its tokens cost, be it another program, or the draft
    model that has to compute first what it has slept through.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._usual: dict[int, float] = {}

    def note(self, num_tokens: int, duration_s: float) -> None:
        """Take in a step."""
        key = _size_class(num_tokens)
        recent = self._recent.setdefault(key, deque(maxlen=7))
        recent.append(duration_s)
        self._usual[key] = sorted(recent)[(len(recent) - 1) // 4]

    def num_known(self, num_tokens: int) -> int:
        """Return how many steps of about so many tokens are remembered."""
        return len(self._recent.get(_size_class(num_tokens), ()))

    def known(self) -> dict[int, float]:
        """Return what is known, by number of tokens."""
        return self._usual


def _size_class(num_tokens: int) -> int:
    shift = max(0, num_tokens.bit_length() - 5)
    return num_tokens >> shift << shift


class Pace:
    """Chooses the number of drafts of every sequence in the next step."""

    def __init__(self, max_tokens: int, record: type[AcceptanceRecord] = AcceptanceRecord) -> None:
        self._max_tokens = max_tokens
        self._plain, self._drafted = StepTimes(), StepTimes()
        self._ever = record(max_tokens, _EVER)
        self._sleep = _FIRST_SLEEP
        self._sleep_left = 0
        self._num_trials = record.num_trials
        self._trials_left = self._num_trials
        self._steps_since_plain = 0
        self._floor = 0.0  # the least share for which a draft is taken
        self._steps_to_floor = 0
        self._num_sequences: int = 0

    @property
    def sleep_left(self) -> int:
        """Steps until drafts are tried again; 0 while they are."""
        return self._sleep_left

    @property
    def is_asleep(self) -> bool:
        """Whether the next step has no drafts whatever could be drafted."""
        return self._sleep_left > 0

    def note_step(self, num_sequences: int, num_drafts: int, duration_s: float) -> None:
        """Take in a step in which num_sequences decoded and nothing else happened, from its start to that of the next."""
        self._sleep_left = max(0, self._sleep_left - 1)
        if num_drafts == 0:
            self._plain.note(num_sequences, duration_s)
            self._steps_since_plain = 0
        else:
            self._drafted.note(num_sequences + num_drafts, duration_s)
            self._steps_since_plain += 1

    def note_verified(self, record: AcceptanceRecord, num_drafts: int, path: Sequence[int]) -> None:
        """Take in how the draft of a sequence fared: the indices of what was accepted."""
        record.note(num_drafts, path)
        self._ever.note(num_drafts, path)

    def choose(self, offers: Sequence[tuple[AcceptanceRecord, int]]) -> list[int]:
        """Return how many drafts to take of each sequence, given its record and how many it could have."""
        num_sequences = len(offers)
        if self._plain.num_known(num_sequences) < _FEW_PLAIN or self._steps_since_plain > _STEPS_BETWEEN_PLAIN:
            return [0] * num_sequences
        prior = self._ever.rates()
        shares = [record.shares(prior)[:count] for record, count in offers]
        if self._trials_left > 0:
            return self._try(shares)
        self._steps_to_floor -= 1
        is_cheap = num_sequences * self._max_tokens <= _CHEAP_RANKING
        if is_cheap or self._steps_to_floor < 0 or num_sequences != self._num_sequences:
            self._steps_to_floor, self._num_sequences = _STEPS_BETWEEN_FLOORS, num_sequences
            if not self._set_floor(num_sequences, shares):
                return [0] * num_sequences
        floor = self._floor
        return [sum(share >= floor for share in one) for one in shares]

    def _try(self, shares: list[list[float]]) -> list[int]:
        """Spread a few drafts over the sequences, to see what they cost and gain."""
        left = max(self._max_tokens, len(shares) // 2)
        chosen: list[int] = []
        for one in shares:
            chosen.append(min(len(one), left))
            left -= chosen[-1]
        if sum(chosen) > 0:
            self._trials_left -= 1
            self._steps_to_floor = 0
        return chosen

    def _set_floor(self, num_sequences: int, shares: list[list[float]]) -> bool:
        """Decide from what share on a draft is worth its cost; return whether any is, else fall asleep."""
        ranked = sorted((share for one in shares for share in one), reverse=True)
        if not ranked:
            self._steps_to_floor = 0  # nothing could be drafted: decide when something can
            return False
        best = self._best_count(num_sequences, ranked)
        if best == 0:
            self._sleep_left, self._sleep = self._sleep, min(2 * self._sleep, _LONGEST_SLEEP)
            self._trials_left = self._num_trials
            return False
        self._sleep = max(_FIRST_SLEEP, self._sleep // 2)
        # Shares move a little until the next decision.
        self._floor = _FLOOR_SLACK * ranked[best - 1] if len(ranked) > _CHEAP_RANKING else ranked[best - 1]
        return True

    def _best_count(self, num_sequences: int, ranked: list[float]) -> int:
        plain_s = self._plain.known()[_size_class(num_sequences)]
        best, best_rate = 0, _NEEDED_GAIN * num_sequences / plain_s
        gained, step = 0.0, 1
        for count, share in enumerate(ranked, start=1):
            gained += share
            if count != step and count != len(ranked):
                continue
            step = max(count + 1, count * 5 // 4)
            rate = (num_sequences + gained) / self._duration(num_sequences, num_sequences + count, plain_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _duration(self, num_sequences: int, num_tokens: int, plain_s: float) -> float:
        """Return how long a step with drafts takes: measured, or on the line between the nearest that are."""
        known = self._drafted.known()
        exact = known.get(_size_class(num_tokens))
        if exact is not None:
            return exact
        below, above = (num_sequences, plain_s), None
        for size, duration_s in known.items():
            if below[0] <= size < num_tokens:
                below = (size, duration_s)
            elif size > num_tokens and (above is None or size < above[0]):
                above = (size, duration_s)
        if above is not None:
            return below[1] + (above[1] - below[1]) * (num_tokens - below[0]) / (above[0] - below[0])
        # As if a token took a twentieth of the step: little enough that it is tried, and then it is known.
        return below[1] * (1 + 0.05 * (num_tokens - below[0]) / num_sequences)
