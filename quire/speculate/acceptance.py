"""AcceptanceRecord: statistics of accepted drafts, which predict the acceptance of the next ones; for chains, trees and
wholes."""

from __future__ import annotations

from collections.abc import Sequence

RECENT_FADING, ALL_FADING = 0.98, 0.995
"""Decay of the averages per draft: in the record of one sequence, and in that of all sequences."""
_PRIOR_WEIGHT = 12.0


class AcceptanceRecord:
    """Moving averages of the acceptance of drafts at each depth, given that the draft before was accepted."""

    def __init__(self, max_tokens: int, fading: float) -> None:
        self._fading = fading
        self._shares: list[float] | None = None
        self.trials = [0.0] * max_tokens
        self.hits = [0.0] * max_tokens

    def note(self, num_drafts: int, path: Sequence[int]) -> None:
        """Record a chain of num_drafts tokens of which those with the indices `path`, the first ones, were accepted."""
        self._shares = None
        num_accepted = len(path)
        for depth in range(min(num_drafts, num_accepted + 1)):
            self.trials[depth] = self.trials[depth] * self._fading + 1.0
            self.hits[depth] = self.hits[depth] * self._fading + (depth < num_accepted)

    def rates(self) -> list[float]:
        """Return the estimated acceptance rate at each depth; 0.75 without data."""
        return [(hits + 0.75) / (trials + 1.0) for hits, trials in zip(self.hits, self.trials, strict=True)]

    def shares(self, prior: Sequence[float]) -> list[float]:
        """Return the probability that all drafts up to each depth are accepted; cached until the next `note`."""
        if self._shares is None:
            product = 1.0
            self._shares = []
            for hits, trials, rate in zip(self.hits, self.trials, prior, strict=True):
                product *= (hits + _PRIOR_WEIGHT * rate) / (trials + _PRIOR_WEIGHT)
                self._shares.append(product)
        return self._shares


class TreeRecord(AcceptanceRecord):
    """Moving averages of the acceptance of drafts at each index of a tree, whose best tokens come first."""

    def note(self, num_drafts: int, path: Sequence[int]) -> None:
        """Record a tree of num_drafts tokens of which those with the indices `path` were accepted."""
        self._shares = None
        accepted = set(path)
        for index in range(num_drafts):
            self.trials[index] = self.trials[index] * self._fading + 1.0
            self.hits[index] = self.hits[index] * self._fading + (index in accepted)

    def rates(self) -> list[float]:
        """Return the estimated acceptance rate at each index; with little data it tends to that of the index before."""
        found: list[float] = []
        before = 0.75
        for hits, trials in zip(self.hits, self.trials, strict=True):
            found.append((hits + 0.75 * before) / (trials + 1.0))
            before = found[-1]
        return found

    def shares(self, prior: Sequence[float]) -> list[float]:
        """Return the probability that the draft at each index is accepted, made non-increasing by pooling."""
        if self._shares is None:
            runs: list[tuple[float, int]] = []  # sum and length
            for hits, trials, rate in zip(self.hits, self.trials, prior, strict=True):
                total, length = (hits + _PRIOR_WEIGHT * rate) / (trials + _PRIOR_WEIGHT), 1
                while runs and runs[-1][0] * length <= total * runs[-1][1]:
                    total, length = total + runs[-1][0], length + runs.pop()[1]
                runs.append((total, length))
            self._shares = [total / length for total, length in runs for _ in range(length)]
        return self._shares


class WholeRecord(AcceptanceRecord):
    """Acceptance of drafts that pay only as a whole: every token gets the average acceptance of all tokens."""

    def note(self, num_drafts: int, path: Sequence[int]) -> None:
        """Record a draft of num_drafts tokens of which those with the indices `path` were accepted."""
        self._shares = None
        self.trials[0] = self.trials[0] * self._fading + num_drafts
        self.hits[0] = self.hits[0] * self._fading + len(path)

    def rates(self) -> list[float]:
        """Return the estimated acceptance rate; one token per draft without data."""
        size = len(self.trials)
        return [(self.hits[0] + 1.0) / (self.trials[0] + size)] * size

    def shares(self, prior: Sequence[float]) -> list[float]:
        """Return the acceptance probability of a token, repeated for the maximum number of tokens."""
        if self._shares is None:
            size = len(self.trials)
            self._shares = [(self.hits[0] + size * prior[0]) / (self.trials[0] + size)] * size
        return self._shares
