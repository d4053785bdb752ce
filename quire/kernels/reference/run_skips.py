"""Runs of keys that decoding need not read, by bounds of their scores (Quest, https://arxiv.org/abs/2406.10774).

A row, one query head of a token, does not read a run of 16 tokens whose scores are all more than `gap` below the highest score
that it has in the first run, its own, and the one before its own. The bound of a run's scores follows from the least and the
greatest value of each dimension of its keys. Those three runs, and all with one of the last 64 tokens, are always read: which
runs a row skips depends on its position, its query and the keys only. The native kernels do not touch what they skip; here it
only loses its weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.contracts.model_spec import AttentionSpec

RUN = 16
NEAR_TOKENS = 64
"""More than the drafts that may follow a known token."""


@dataclass(frozen=True, slots=True)
class RunSkips:
    """Which tokens of a step skip runs.

    gaps    [T] f32: of each token, in units of natural logarithms; inf: it reads all
    counts  runs of a kv head that all its query heads might have skipped, and those that they have; added to by every layer
    """

    gaps: Tensor
    counts: list[int] = field(default_factory=lambda: [0, 0])

    def hide(self, scores: Tensor, q: Tensor, k: Tensor, tokens: Tensor, ends: Tensor, spec: AttentionSpec) -> Tensor:
        """Return scores with -inf in the runs that are skipped.

        scores  [X, G, Q, N], finished: scaled and capped; X and G are any dimensions
        q       [X, G, Q, D], and k [X, 1, N, D] the keys of N tokens from the first one on
        tokens  broadcastable to [X, 1, Q]: index of each query's token in the step
        ends    the same: its position plus 1
        """
        num_runs = k.shape[-2] // RUN
        gaps = self.gaps[tokens][..., None]
        runs, last = torch.arange(num_runs), (ends[..., None] - 1) // RUN
        may_skip = (runs > 0) & ((runs + 1) * RUN <= ends[..., None] - NEAR_TOKENS) & torch.isfinite(gaps)
        if not bool(may_skip.any()):
            return scores
        keys = k[..., : num_runs * RUN, :].float().unflatten(-2, (num_runs, RUN))
        query, low, high = q.float(), keys.amin(-2), keys.amax(-2)
        bounds = query.clamp(min=0) @ high.transpose(-1, -2) + query.clamp(max=0) @ low.transpose(-1, -2)
        bounds = cap(bounds * spec.scale, spec)
        places = torch.arange(scores.shape[-1])
        is_floor = (places < RUN) | ((places // RUN >= last - 1) & (places < ends[..., None]))
        floors = scores.float().masked_fill(~is_floor, -torch.inf).amax(-1, keepdim=True)
        skipped = (bounds < floors - gaps) & may_skip
        self.counts[0] += int(may_skip.expand_as(skipped).all(1).sum())
        self.counts[1] += int(skipped.all(1).sum())
        is_hidden = torch.zeros(scores.shape, dtype=torch.bool)
        is_hidden[..., : num_runs * RUN] = skipped.repeat_interleave(RUN, -1)
        return scores.masked_fill(is_hidden, -torch.inf)


def cap(scores: Tensor, spec: AttentionSpec) -> Tensor:
    """Return scores with the soft cap of a layer."""
    return scores if spec.softcap is None else torch.tanh(scores / spec.softcap) * spec.softcap
