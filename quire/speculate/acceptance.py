"""AcceptanceRecord: how drafts fared, and how likely the next ones are to be accepted; of chains, of trees, of wholes."""

from __future__ import annotations

from collections.abc import Sequence

RECENT_FADING, ALL_FADING = 0.98, 0.995
"""What is left of the past after a draft: in the record of one sequence, and in that of all there ever were."""
_PRIOR_WEIGHT = 12.0


class AcceptanceRecord:
    """How often the draft at each depth was accepted, where the one before it was: moving averages."""

    def __init__(self, max_tokens: int, fading: float) -> None:
        self._fading = fading
        self._shares: list[float] | None = None
        self.trials = [0.0] * max_tokens
        self.hits = [0.0] * max_tokens

    def note(self, num_drafts: int, path: Sequence[int]) -> None:
        """Count a chain of num_drafts tokens of which those with the indices `path`, the first ones, were accepted."""
        self._shares = None
        num_accepted = len(path)
        for depth in range(min(num_drafts, num_accepted + 1)):
            self.trials[depth] = self.trials[depth] * self._fading + 1.0
            self.hits[depth] = self.hits[depth] * self._fading + (depth < num_accepted)

    def rates(self) -> list[float]:
        """Return the estimated share of acceptances at each depth; three in four where nothing is known."""
        return [(hits + 0.75) / (trials + 1.0) for hits, trials in zip(self.hits, self.trials, strict=True)]

    def shares(self, prior: Sequence[float]) -> list[float]:
        """Return the probability that the drafts up to each depth are all accepted; as of the last note."""
        if self._shares is None:
            product = 1.0
            self._shares = []
            for hits, trials, rate in zip(self.hits, self.trials, prior, strict=True):
                product *= (hits + _PRIOR_WEIGHT * rate) / (trials + _PRIOR_WEIGHT)
                self._shares.append(product)
        return self._shares


class TreeRecord(AcceptanceRecord):
    """How often the draft at each index of a tree was accepted: the best ones come first, wherever they hang."""

    def note(self, num_drafts: int, path: Sequence[int]) -> None:
        """Count a tree of num_drafts tokens of which those with the indices `path` were accepted."""
        self._shares = None
        accepted = set(path)
        for index in range(num_drafts):
            self.trials[index] = self.trials[index] * self._fading + 1.0
            self.hits[index] = self.hits[index] * self._fading + (index in accepted)

    def rates(self) -> list[float]:
        """Return the estimated share of acceptances at each index; where little is known that of the one before and less."""
        found: list[float] = []
        before = 0.75
        for hits, trials in zip(self.hits, self.trials, strict=True):
            found.append((hits + 0.75 * before) / (trials + 1.0))
            before = found[-1]
        return found

    def shares(self, prior: Sequence[float]) -> list[float]:
        """Return the probability that the draft at each index is accepted, never rising: equal ones go together."""
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
    """How many tokens of drafts were accepted, of which a part is worth nothing: every token counts as the average one."""

    def note(self, num_drafts: int, path: Sequence[int]) -> None:
        """Count a draft of num_drafts tokens of which those with the indices `path` were accepted."""
        self._shares = None
        self.trials[0] = self.trials[0] * self._fading + num_drafts
        self.hits[0] = self.hits[0] * self._fading + len(path)

    def rates(self) -> list[float]:
        """Return the estimated share of acceptances; one token in a draft where nothing is known."""
        size = len(self.trials)
        return [(self.hits[0] + 1.0) / (self.trials[0] + size)] * size

    def shares(self, prior: Sequence[float]) -> list[float]:
        """Return the probability that a token is accepted, as often as there can be tokens."""
        if self._shares is None:
            size = len(self.trials)
            self._shares = [(self.hits[0] + size * prior[0]) / (self.trials[0] + size)] * size
        return self._shares
