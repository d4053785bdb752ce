"""PromptCost: what prompts cost a backend until the first byte of an answer. CostEstimate learns it from streams."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_DECAY = 0.99
"""Of the weight of a stream with each later one: a backend whose speed changes is followed within some hundred."""
_LEAST_DETERMINANT = 1e-6


@dataclass(frozen=True, slots=True)
class PromptCost:
    """Seconds until the first byte: for each prompt, whatever its length, and for each token that has to be computed."""

    s_per_prompt: float = 0.0
    s_per_token: float = 0.0005

    def seconds(self, num_prompts: int, num_tokens: int) -> float:
        """Return the seconds that so many prompts take, one after the other, with so many tokens together."""
        return self.s_per_prompt * num_prompts + self.s_per_token * num_tokens


class CostEstimate:
    """Non-negative least squares of two variables, with weights that decay."""

    def __init__(self) -> None:
        self._prompts2 = self._both = self._tokens2 = 0.0
        self._prompts_s = self._tokens_s = 0.0

    def add(self, num_prompts: int, num_tokens: int, took_s: float) -> PromptCost:
        """Return the cost after one more stream, whose first byte came `took_s` after it was sent.

        num_prompts, num_tokens  that had to be computed until then: those that waited before it, and its own; at least 1
        """
        self._prompts2 = _DECAY * self._prompts2 + num_prompts * num_prompts
        self._both = _DECAY * self._both + num_prompts * num_tokens
        self._tokens2 = _DECAY * self._tokens2 + num_tokens * num_tokens
        self._prompts_s = _DECAY * self._prompts_s + num_prompts * took_s
        self._tokens_s = _DECAY * self._tokens_s + num_tokens * took_s
        determinant = self._prompts2 * self._tokens2 - self._both * self._both
        only_tokens = PromptCost(0.0, self._tokens_s / self._tokens2)
        if determinant < _LEAST_DETERMINANT * self._prompts2 * self._tokens2:  # all streams were alike
            return only_tokens
        s_per_prompt = (self._prompts_s * self._tokens2 - self._tokens_s * self._both) / determinant
        s_per_token = (self._tokens_s * self._prompts2 - self._prompts_s * self._both) / determinant
        if s_per_prompt < 0:
            return only_tokens
        return PromptCost(s_per_prompt, s_per_token) if s_per_token > 0 else PromptCost(self._prompts_s / self._prompts2, 0.0)


def mean_cost(costs: Iterable[PromptCost | None]) -> PromptCost:
    """Return the mean of the costs that are known: of a backend that has not shown it yet."""
    known = [one for one in costs if one is not None]
    if not known:
        return PromptCost()
    return PromptCost(sum(one.s_per_prompt for one in known) / len(known), sum(one.s_per_token for one in known) / len(known))
