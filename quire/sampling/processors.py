"""Logits processors: a request's changes to its logits before a token is sampled.

Order: the token mask of a constraint and of bad words, allowed_token_ids, min_tokens, logit_bias, repetition penalty, frequency
and presence penalties. They apply to greedy rows too. Temperature and the truncations come after (truncation.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.sampling.row_state import SamplingRow

_NEVER = float("-inf")


def apply_token_masks(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Apply the rows' token masks in place. The native sampler reads the masks itself.

    logits  [R, V] f32, one row per element of `rows`
    """
    bits = torch.arange(32, dtype=torch.int32)
    for index, row in enumerate(rows):
        if row.token_mask is not None:
            is_allowed = ((row.token_mask[:, None] >> bits) & 1).bool().flatten()[: logits.shape[1]]
            logits[index].masked_fill_(~is_allowed.to(logits.device), _NEVER)


def process_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Apply the processors of each row in place; rows without processors are not changed.

    logits  [R, V] f32, one row per element of `rows`
    """
    _allow_only(logits, rows)
    _forbid(logits, rows)
    for index, row in enumerate(rows):
        if not row.edits_logits:
            continue
        row_logits = logits[index]
        if row.bias_ids is not None and row.bias_values is not None:
            row_logits[row.bias_ids] += row.bias_values.to(logits.device)
        if row.known_counts is not None:
            _penalise_repetition(row_logits, row.known_counts.ids, row.repetition_penalty)
        if row.output_counts is not None:
            ids, counts = row.output_counts.ids, row.output_counts.counts
            penalty = counts * row.params.frequency_penalty + row.params.presence_penalty
            row_logits[ids] -= penalty.to(logits.device)


def _allow_only(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    for index, row in enumerate(rows):
        if row.allowed_ids is not None:
            kept = logits[index, row.allowed_ids]
            logits[index] = _NEVER
            logits[index, row.allowed_ids] = kept


def _forbid(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Mask what min_tokens forbids: one write for the whole batch."""
    row_ids: list[int] = []
    token_ids: list[int] = []
    for index, row in enumerate(rows):
        if row.ending_ids:
            forbidden = row.forbidden_ids()
            row_ids += [index] * len(forbidden)
            token_ids += forbidden
    if token_ids:
        logits[torch.tensor(row_ids), torch.tensor(token_ids)] = _NEVER


def _penalise_repetition(row_logits: Tensor, ids: Tensor, penalty: float) -> None:
    """Divide positive and multiply negative logits; the division is a product with 1 / penalty, equal on every device."""
    scores = row_logits[ids]
    row_logits[ids] = torch.where(scores > 0, scores * (1.0 / penalty), scores * penalty)
