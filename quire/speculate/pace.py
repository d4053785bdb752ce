"""Pace: how many tokens to draft, from what drafts have cost and gained so far.

A step of T tokens takes t(T). A sequence that decodes gains one token in it, and with drafts also those that are accepted.
Drafts are ranked by the probability that they are accepted, and as many are taken as make tokens per second highest. When none
pay, nothing is even looked for during a sleep, which doubles each time up to a limit: what the trials between cost is below a
hundredth then. Nothing here changes a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

_NEEDED_GAIN = 1.02
_RECENT, _EVER = 0.9, 0.98
_PRIOR_WEIGHT = 2.0
_FIRST_SLEEP, _LONGEST_SLEEP = 16, 1024
_NUM_TRIALS = 3
_STEPS_BETWEEN_PLAIN = 96
_FEW_PLAIN = 2


class AcceptanceRecord:
    """How often the draft at each depth was accepted, where the one before it was; the past fades."""

    def __init__(self, max_tokens: int, fading: float) -> None:
        self._fading = fading
        self.trials = [0.0] * max_tokens
        self.hits = [0.0] * max_tokens

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Count a chain of num_drafts tokens of which the first num_accepted were accepted."""
        for depth in range(min(num_drafts, num_accepted + 1)):
            self.trials[depth] = self.trials[depth] * self._fading + 1.0
            self.hits[depth] = self.hits[depth] * self._fading + (depth < num_accepted)

    def shares(self, count: int, prior: Sequence[float]) -> list[float]:
        """Return the probabilities that the first `count` drafts are all accepted up to each depth."""
        product = 1.0
        shares: list[float] = []
        for depth in range(count):
            product *= (self.hits[depth] + _PRIOR_WEIGHT * prior[depth]) / (self.trials[depth] + _PRIOR_WEIGHT)
            shares.append(product)
        return shares


class StepTimes:
    """How long recent steps of so many tokens took, in seconds."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}

    def note(self, num_tokens: int, duration_s: float) -> None:
        """Take in a step."""
        key = _size_class(num_tokens)
        recent = self._recent.setdefault(key, deque(maxlen=7))
        recent.append(duration_s)
        self._medians[key] = median(recent)

    def num_known(self, num_tokens: int) -> int:
        """Return how many steps of about so many tokens are remembered."""
        return len(self._recent.get(_size_class(num_tokens), ()))

    def known(self) -> dict[int, float]:
        """Return what is known, by number of tokens."""
        return self._medians


def _size_class(num_tokens: int) -> int:
    shift = max(0, num_tokens.bit_length() - 5)
    return num_tokens >> shift << shift


class Pace:
    """Chooses the number of drafts of every sequence in the next step."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._plain, self._drafted = StepTimes(), StepTimes()
        self._ever = AcceptanceRecord(max_tokens, _EVER)
        self._sleep = _FIRST_SLEEP
        self._sleep_left = 0
        self._trials_left = _NUM_TRIALS
        self._steps_since_plain = 0

    @property
    def is_asleep(self) -> bool:
        """Whether the next step has no drafts whatever could be drafted."""
        return self._sleep_left > 0

    def note_step(self, num_sequences: int, num_drafts: int, duration_s: float) -> None:
        """Take in a step in which num_sequences decoded and nothing else happened."""
        self._sleep_left = max(0, self._sleep_left - 1)
        if num_drafts == 0:
            self._plain.note(num_sequences, duration_s)
            self._steps_since_plain = 0
        else:
            self._drafted.note(num_sequences + num_drafts, duration_s)
            self._steps_since_plain += 1

    def note_verified(self, record: AcceptanceRecord, num_drafts: int, num_accepted: int) -> None:
        """Take in how the draft of a sequence fared."""
        record.note(num_drafts, num_accepted)
        self._ever.note(num_drafts, num_accepted)

    def choose(self, offers: Sequence[tuple[AcceptanceRecord, int]]) -> list[int]:
        """Return how many drafts to take of each sequence, given its record and how many it could have."""
        none = [0] * len(offers)
        num_sequences = len(offers)
        if self._plain.num_known(num_sequences) < _FEW_PLAIN or self._steps_since_plain > _STEPS_BETWEEN_PLAIN:
            return none
        prior = [
            (hits + 1.5) / (trials + _PRIOR_WEIGHT) for hits, trials in zip(self._ever.hits, self._ever.trials, strict=True)
        ]
        ranked: list[tuple[float, int]] = []
        for index, (record, count) in enumerate(offers):
            ranked += [(-share, index) for share in record.shares(count, prior)]
        if not ranked:
            return none
        ranked.sort()
        if self._trials_left > 0:
            self._trials_left -= 1
            best = min(len(ranked), max(self._max_tokens, num_sequences // 2))
        else:
            best = self._best_count(num_sequences, ranked)
        if best == 0:
            self._sleep_left, self._sleep = self._sleep, min(2 * self._sleep, _LONGEST_SLEEP)
            self._trials_left = _NUM_TRIALS
            return none
        if self._trials_left == 0:
            self._sleep = max(_FIRST_SLEEP, self._sleep // 2)
        chosen = none
        for _, index in ranked[:best]:
            chosen[index] += 1
        return chosen

    def _best_count(self, num_sequences: int, ranked: list[tuple[float, int]]) -> int:
        plain_s = self._plain.known()[_size_class(num_sequences)]
        best, best_rate = 0, _NEEDED_GAIN * num_sequences / plain_s
        gained, step = 0.0, 1
        for count, (share, _) in enumerate(ranked, start=1):
            gained -= share
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
