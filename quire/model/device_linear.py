"""DeviceLinear: one linear layer on a GPU, dense or quantised, of one weight or of several over the same inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.triton.float8 import multiply_float8, suits_float8
from quire.kernels.triton.linear import multiply, multiply_in_order, widen
from quire.kernels.triton.quantized_weights import DeviceQuantizedWeight

_WIDENED_FROM = 257
"""Tokens from which on a quantised weight is made dense for the product: the library's product of plain weights is then faster
by more than making it dense takes. Not measured yet."""

DeviceWeight = Tensor | DeviceQuantizedWeight
"""[O, K], dense or quantised."""


@dataclass(frozen=True, slots=True)
class DeviceLinear:
    """x @ weight^T (+ bias).

    parts        the rows of the weight, one part after the other
    bias         [O] or None
    is_in_order  sums have the same order at any number of tokens, so that a row has the same bits; slower
    """

    parts: tuple[DeviceWeight, ...]
    bias: Tensor | None = None
    is_in_order: bool = False

    @property
    def is_dense(self) -> bool:
        """Whether it is one plain weight."""
        return len(self.parts) == 1 and isinstance(self.parts[0], Tensor)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the product [T, O] of x [T, K], in x's dtype; written in `out` if that is given."""
        if len(self.parts) > 1:
            sizes = [part.shape[0] for part in self.parts]
            biases = [None] * len(sizes) if self.bias is None else list(self.bias.split(sizes))
            products = [self._product(x, part, bias) for part, bias in zip(self.parts, biases, strict=True)]
            return torch.cat(products, 1, out=out)
        return self._product(x, self.parts[0], self.bias, out)

    def lookup(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows ids [R] i64 of a weight of one part, dense."""
        weight = self.parts[0]
        return F.embedding(ids, weight) if isinstance(weight, Tensor) else widen(weight, dtype, ids)

    def _product(self, x: Tensor, weight: DeviceWeight, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if isinstance(weight, DeviceQuantizedWeight):
            is_float8 = not self.is_in_order and suits_float8(x, weight)
            if is_float8 or self.is_in_order or len(x) < _WIDENED_FROM:
                found = multiply_float8(x, weight, bias) if is_float8 else multiply(x, weight, bias)
                return found if out is None else out.copy_(found)
            x = x if weight.columns is None else x.index_select(1, weight.columns)
            weight = widen(weight, x.dtype)
        elif self.is_in_order:
            return multiply_in_order(x, weight, bias, out)
        if out is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
