"""Pooler: the hidden states of a prompt, step by step, into one vector."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from quire.contracts.pooling_params import PoolingParams
from quire.worker.pooling_head import PoolingHead

_MIN_LENGTH = 1e-12
"""Vectors shorter than this are divided by it instead: one of zeros stays so."""


class Pooler:
    """What has been pooled of one sequence; begins anew when the sequence does, after a preemption.

    params  as PoolerSpec.resolve returns them
    head    applied to the pooled hidden state; None: the checkpoint has none
    """

    def __init__(self, params: PoolingParams, head: PoolingHead | None = None) -> None:
        self.params = params
        self._head = head
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
        """Return the vector, or the scores of classes, f32 values; None where they are not finite. At least one token must have
        been taken in."""
        if self._sum is None or not np.isfinite(self._sum).all():
            return None
        vector = self._sum / self._num_tokens
        if self._head is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                vector = self._head.apply(vector)
            if not np.isfinite(vector).all():
                return None
        if self.params.task != "embed":
            if self._head is not None and self.params.use_activation is not False:
                vector = self._head.activate(vector)
            return tuple(vector.astype(np.float32).tolist())
        vector = vector[: self.params.dimensions]
        if self.params.normalize is not False:
            # fsum is exact: the length does not depend on an order of summation.
            vector = vector / max(math.sqrt(math.fsum(np.square(vector))), _MIN_LENGTH)
        return tuple(vector.astype(np.float32).tolist())
