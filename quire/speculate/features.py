"""What the model has computed of tokens, as it waits for who drafts with it: parts of what steps left, which are not copied."""

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
        """Return them [count, F]; no copy."""
        return self.features[self.first : self.first + self.count]

    def kept(self) -> FeatureRun:
        """Return the run as it may wait for long: copied if what it is a part of is more than twice as large."""
        return self if 2 * self.count >= len(self.features) else FeatureRun(self.rows().clone(), 0, self.count)


def join(runs: Sequence[FeatureRun], may_go_on: bool = False) -> Tensor:
    """Return the rows of all runs, one after the other: no copy where they stand so already, as those of one step do.

    may_go_on: other rows may stand behind these, which saves a tensor
    """
    features, first, end = runs[0].features, runs[0].first, runs[0].first
    for run in runs:
        if run.features is not features or run.first != end:
            return torch.cat([run.rows() for run in runs])
        end += run.count
    return features if first == 0 and (may_go_on or end == features.size(0)) else features[first:end]
