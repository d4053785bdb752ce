"""HeadPass: inputs of one forward pass of a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.reference.attention import AttentionMetadata


@dataclass(frozen=True, slots=True)
class HeadPass:
    """The positions that a pass computes, of all sequences, concatenated; see NativeHead.enter.

    token_ids, positions  [T] i64
    features              [T, F] f32
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionMetadata
    features: Tensor


def index_tensor(values: Sequence[int]) -> Tensor:
    """Return the values as i64."""
    return torch.from_numpy(np.array(values, dtype=np.int64))
