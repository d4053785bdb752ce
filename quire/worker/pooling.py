"""Pooler: the hidden states of a prompt, step by step, into one vector."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from quire.contracts.pooling_params import PoolingParams

_MIN_LENGTH = 1e-12
"""Vectors shorter than this are divided by it instead: one of zeros stays so."""


class Pooler:
    """What has been pooled of one sequence; begins anew when the sequence does, after a preemption."""

    def __init__(self, params: PoolingParams) -> None:
        self.params = params
        self._sum: NDArray[np.float64] | None = None
        self._num_tokens = 0

    def add(self, hidden: NDArray[np.float32]) -> None:
        """Take in the hidden states [N, hidden_size] of the next tokens; where the last one is pooled, only of that.

        Token by token in f64: the sum has the same bits however the prompt was cut.
        """
        total = np.zeros(hidden.shape[1]) if self._sum is None else self._sum
        with np.errstate(invalid="ignore"):  # of infinities; result says so
            for row in hidden:
                total += row
        self._sum = total
        self._num_tokens += len(hidden)

    def result(self) -> tuple[float, ...] | None:
        """Return the vector, f32 values, or None where it is not finite. At least one token must have been taken in."""
        if self._sum is None or not np.isfinite(self._sum).all():
            return None
        vector = (self._sum / self._num_tokens)[: self.params.dimensions]
        if self.params.normalize:
            # fsum is exact: the length does not depend on an order of summation.
            vector = vector / max(math.sqrt(math.fsum(np.square(vector))), _MIN_LENGTH)
        return tuple(vector.astype(np.float32).tolist())
