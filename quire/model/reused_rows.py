"""ReusedRows: memory for rows that are handed out, read, and soon let go."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

_KEPT_ROWS, _MOST_KEPT = 16, 2
"""Rows of what is kept, for one sequence and its drafts, and how many of these: what a step left is read behind the next."""
_OWN_REFERENCES = 2
"""To a tensor that nobody else holds: the list, and the argument of the function that counts."""


class ReusedRows:
    """Rows [R, width] f32 in the memory of earlier ones that nobody holds any more.

    To make a tensor behind a pass of the weights takes longer than to fill it: what makes one must come from memory first.
    Who holds a part of what was handed out must hold the tensor, too.
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
