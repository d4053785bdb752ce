"""Parameters of a model as they are loaded, quantised or not, and dense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.quant.weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class QuantizedStack:
    """The weights [O, K] of all experts of a layer, one after the other; they may differ in all but their shape."""

    weights: tuple[QuantizedWeight, ...]

    def __post_init__(self) -> None:
        if len({weight.shape for weight in self.weights}) != 1:
            raise InvariantError(f"weights of shapes {sorted({weight.shape for weight in self.weights})} are no stack")

    @property
    def shape(self) -> tuple[int, int, int]:
        """[E, O, K]"""
        return (len(self.weights), *self.weights[0].shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights [E, O, K], computed in f32."""
        dense = torch.empty(self.shape, dtype=dtype)
        for index, weight in enumerate(self.weights):
            dense[index] = weight.dequantize(dtype)
        return dense


Parameter = Tensor | QuantizedWeight | QuantizedStack


def dense_parameters(parameters: Mapping[str, Parameter], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the parameters with every quantised one as a tensor of `dtype`; plain tensors stay the same objects."""
    return {
        name: parameter if isinstance(parameter, Tensor) else parameter.dequantize(dtype)
        for name, parameter in parameters.items()
    }
