"""DeviceLinear: one linear layer on a GPU, dense or quantised, of one weight or of several over the same inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.triton.float8 import multiply_float8, suits_float8
from quire.kernels.triton.hopper_linear import multiply_large_batch
from quire.kernels.triton.linear import dequantize, multiply, multiply_in_order
from quire.kernels.triton.quantized_weights import DeviceQuantizedWeight

DEQUANTIZE_FROM = 193
"""From this number of tokens on a quantised weight is dequantised for the product: the library's dense product is then faster
by more than dequantising takes. Measured with 4-bit weights on an H200."""

DeviceWeight = Tensor | DeviceQuantizedWeight
"""[O, K], dense or quantised."""


@dataclass(frozen=True, slots=True)
class DeviceLinear:
    """x @ weight^T (+ bias).

    parts        the rows of the weight, one part after the other
    bias         [O] or None
    is_in_order  batch-invariant: sums have the same order for any number of tokens, so a row has the same bits; slower
    whole_rows   of each part, on all tensor-parallel ranks together; None: the parts are whole
    """

    parts: tuple[DeviceWeight, ...]
    bias: Tensor | None = None
    is_in_order: bool = False
    whole_rows: tuple[int, ...] | None = None

    @property
    def is_dense(self) -> bool:
        """Whether it is one plain weight."""
        return len(self.parts) == 1 and isinstance(self.parts[0], Tensor)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the product [T, O] of x [T, K], in x's dtype; written in `out` if that is given."""
        if len(self.parts) > 1:
            sizes = [part.shape[0] for part in self.parts]
            biases = [None] * len(sizes) if self.bias is None else list(self.bias.split(sizes))
            products = [self._product(x, index, bias) for index, bias in enumerate(biases)]
            return torch.cat(products, 1, out=out)
        return self._product(x, 0, self.bias, out)

    def lookup(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows ids [R] i64 of a weight of one part, dense."""
        weight = self.parts[0]
        if ids.is_meta and isinstance(weight, Tensor):
            return torch.empty(len(ids), weight.shape[1], dtype=weight.dtype, device=ids.device)
        return F.embedding(ids, weight) if isinstance(weight, Tensor) else dequantize(weight, dtype, ids)

    def _product(self, x: Tensor, index: int, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        weight = self.parts[index]
        whole_rows = None if self.whole_rows is None else self.whole_rows[index]
        if isinstance(weight, DeviceQuantizedWeight):
            found = None if self.is_in_order else multiply_large_batch(x, weight, bias)
            if found is None:
                is_float8 = not self.is_in_order and suits_float8(x, weight)
                if is_float8 or self.is_in_order or x.shape[0] < DEQUANTIZE_FROM:
                    found = multiply_float8(x, weight, bias) if is_float8 else multiply(x, weight, bias, whole_rows)
            if found is not None:
                return found if out is None else out.copy_(found)
            x = x if weight.columns is None else x.index_select(1, weight.columns)
            weight = dequantize(weight, x.dtype)
        elif self.is_in_order:
            return multiply_in_order(x, weight, bias, out, whole_rows)
        if x.is_meta:  # torch finds shapes in Python there, and imports sympy for it, which takes a second or two
            return torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device) if out is None else out
        if out is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
