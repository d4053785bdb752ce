"""target_probs: the probability distribution of the next token that the sampler uses."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.sampling.processors import apply_token_masks, process_logits
from quire.sampling.row_state import SamplingRow
from quire.sampling.truncation import has_truncation, truncate


def target_probs(logits: Tensor, row: SamplingRow) -> Tensor:
    """Return the probabilities [V] f32 of the next token of a row, after processors, temperature and truncations.

    logits  [V] any float type, unchanged. The result is all zero or NaN if no token can follow
    """
    scores = logits[None].to(torch.float32, copy=True)
    apply_token_masks(scores, [row])
    process_logits(scores, [row])
    if row.is_greedy:
        law = torch.zeros_like(scores[0])
        law[scores[0].argmax()] = 1.0
        return law
    scores *= row.inverse_temperature
    if has_truncation(row.params, scores.shape[1]) and bool(scores.max().isfinite()):
        parts = truncate(scores, [0], [row.params])
        scores = torch.full_like(scores, -torch.inf)
        for part in parts:
            scores[0, part.token_ids] = part.values
    return scores[0].softmax(-1)
