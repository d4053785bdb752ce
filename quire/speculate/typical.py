"""Typical acceptance: drafts that the model would not have sampled are taken where it finds them likely enough. Lossy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.sampling.row_state import SamplingRow
from quire.sampling.target_probs import target_probs
from quire.speculate.draft import Draft


@dataclass(frozen=True, slots=True)
class TypicalAcceptance:
    """Takes a draft of probability p > min(threshold, alpha * exp(-H)), H the entropy in nats (arXiv 2401.10774, 3.3.1).

    Probabilities are those that the sampler draws by. Greedy requests are not touched: their entropy is zero.
    """

    threshold: float
    alpha: float

    def bound(self, law: Tensor) -> float:
        """Return what the probability of a draft must exceed, given all of them [V]."""
        entropy = -float(torch.xlogy(law, law).sum())
        return min(self.threshold, self.alpha * math.exp(-entropy))

    def pick(self, logits: Tensor, row: SamplingRow, draft: Draft, node: int) -> int | None:
        """Return the likeliest draft behind `node` that is likely enough, None if there is none.

        logits  [V] behind the token of `node`
        """
        if row.is_greedy or node not in draft.parents[node + 1 :]:
            return None
        law = target_probs(logits, row)
        bound = self.bound(law)
        children = [index for index in range(node + 1, len(draft)) if draft.parents[index] == node]
        best = max(children, key=lambda index: float(law[draft.tokens[index]]))
        return best if float(law[draft.tokens[best]]) > bound else None
