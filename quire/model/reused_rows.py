"""ReusedRows: reusable memory for short-lived rows."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

_KEPT_ROWS, _MOST_KEPT = 16, 2
"""Rows of kept arrays, for one sequence and its drafts, and their number: a step's rows are read after the next step."""
_OWN_REFERENCES = 2
"""References to an unshared tensor: the list, and the argument of the counting function."""


class ReusedRows:
    """Rows [R, width] f32 in the memory of earlier rows that are no longer referenced.

    Allocating a tensor after a pass over the weights takes longer than filling it, because the allocator's code and data
    have been evicted from the caches.

    A caller that keeps a part of the rows must keep a reference to the tensor, too.
    """

    def __init__(self) -> None:
        self._made: list[Tensor] = []
        self._width = 0

    def take(self, count: int, width: int) -> Tensor:
        """Return uninitialised rows, `count` or more of them."""
        if count > _KEPT_ROWS:
            return torch.empty(count, width)
        for place in range(len(self._made)):
            if sys.getrefcount(self._made[place]) <= _OWN_REFERENCES and self._width == width:
                return self._made[place]
        if self._width != width:
            self._made, self._width = [], width
        made = torch.empty(_KEPT_ROWS, width)
        if len(self._made) < _MOST_KEPT:
            self._made.append(made)
        return made
