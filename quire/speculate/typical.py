"""Typical acceptance: also accepts drafts that were not sampled, if the model's probability is high enough. Lossy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.sampling.processors import apply_token_masks, process_logits
from quire.sampling.row_state import SamplingRow
from quire.sampling.truncation import has_truncation, truncate
from quire.speculate.draft import Draft


def target_probs(logits: Tensor, row: SamplingRow) -> Tensor:
    """Return the probabilities [V] f32 of the next token of a row, after processors, temperature and truncations.

    logits  [V] any float type, unchanged. The result is all zero or NaN if no token can follow
    """
    scores = logits[None].to(torch.float32, copy=True)
    apply_token_masks(scores, [row])
    process_logits(scores, [row])
    if row.is_greedy:
        probs = torch.zeros_like(scores[0])
        probs[scores[0].argmax()] = 1.0
        return probs
    scores *= row.inverse_temperature
    if has_truncation(row.params, scores.shape[1]) and bool(scores.max().isfinite()):
        parts = truncate(scores, [0], [row.params])
        scores = torch.full_like(scores, -torch.inf)
        for part in parts:
            scores[0, part.token_ids] = part.values
    return scores[0].softmax(-1)


@dataclass(frozen=True, slots=True)
class TypicalAcceptance:
    """Accepts a draft of probability p > min(threshold, alpha * exp(-H)), H the entropy in nats (arXiv 2401.10774, 3.3.1).

    Probabilities are those that the sampler uses. Greedy requests are not affected: their entropy is zero.
    """

    threshold: float
    alpha: float

    def bound(self, probs: Tensor) -> float:
        """Return the bound that a draft's probability must exceed, given the probabilities of all tokens [V]."""
        entropy = -float(torch.xlogy(probs, probs).sum())
        return min(self.threshold, self.alpha * math.exp(-entropy))

    def pick(self, logits: Tensor, row: SamplingRow, draft: Draft, node: int) -> int | None:
        """Return the most probable child of `node` that is acceptable, None if there is none.

        logits  [V] after the token of `node`
        """
        if row.is_greedy or node not in draft.parents[node + 1 :]:
            return None
        probs = target_probs(logits, row)
        bound = self.bound(probs)
        children = [index for index in range(node + 1, len(draft)) if draft.parents[index] == node]
        best = max(children, key=lambda index: float(probs[draft.tokens[index]]))
        return best if float(probs[draft.tokens[best]]) > bound else None
