"""FeatureRun: hidden states that wait for a proposer. They are views of a step's tensor, not copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class FeatureRun(NamedTuple):
    """Rows [first, first + count) of features [R, F] f32."""

    features: Tensor
    first: int
    count: int

    def rows(self) -> Tensor:
        """Return the rows [count, F], a view."""
        return self.features[self.first : self.first + self.count]

    def kept(self) -> FeatureRun:
        """Return a run for long storage: a copy if the whole tensor is more than twice as large."""
        return self if 2 * self.count >= len(self.features) else FeatureRun(self.rows().clone(), 0, self.count)


def join(runs: Sequence[FeatureRun], may_go_on: bool = False) -> Tensor:
    """Return the rows of all runs, concatenated; a view if they are consecutive rows of one tensor, as those of one step are.

    may_go_on: the result may have more rows at the end, which saves creating a tensor
    """
    features, first, end = runs[0].features, runs[0].first, runs[0].first
    for run in runs:
        if run.features is not features or run.first != end:
            return torch.cat([run.rows() for run in runs])
        end += run.count
    return features if first == 0 and (may_go_on or end == features.size(0)) else features[first:end]
