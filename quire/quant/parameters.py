"""Parameters of a model: stored in a checkpoint, loaded (quantised or not), and dense."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.quant.float8 import Float8Weight
from quire.quant.weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class QuantizedStack:
    """The weights [O, K] of all experts of a layer; they share only the shape."""

    weights: tuple[QuantizedWeight, ...]

    def __post_init__(self) -> None:
        if len({weight.shape for weight in self.weights}) != 1:
            raise InvariantError(f"weights of shapes {sorted({weight.shape for weight in self.weights})} cannot be stacked")

    @property
    def shape(self) -> tuple[int, int, int]:
        """[E, O, K]."""
        return (len(self.weights), *self.weights[0].shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights [E, O, K], computed in f32."""
        dense = torch.empty(self.shape, dtype=dtype)
        for index, weight in enumerate(self.weights):
            dense[index] = weight.dequantize(dtype)
        return dense


Parameter = Tensor | QuantizedWeight | QuantizedStack
DenseOrQuantized = Tensor | QuantizedWeight | Float8Weight
"""A weight [O, K] in a form that kernels can run."""


class StoredParameter(ABC):
    """A parameter that is still in its checkpoint, so that a model can be built with only one of them in memory at a time."""

    @property
    @abstractmethod
    def is_integer(self) -> bool:
        """Whether it is stored as integers; it loads as integers if its parts are compatible."""

    @property
    @abstractmethod
    def is_quantized(self) -> bool:
        """Whether it is stored quantised, as integers or otherwise."""

    @property
    @abstractmethod
    def layout(self) -> tuple[object, ...]:
        """Formats, dtypes and shapes of its stored tensors: parameters of equal layouts load in the same way."""

    @abstractmethod
    def open(self) -> Tensor | QuantizedWeight:
        """Return a parameter that is not a stack: a tensor may be a view of the file, with another dtype or with strides."""

    @abstractmethod
    def open_expert(self, index: int) -> Tensor | QuantizedWeight:
        """Return the weight [O, K] of one expert of a stack, like `open`."""

    @abstractmethod
    def open_quantized(self, index: int | None = None) -> DenseOrQuantized:
        """Like `open`, or `open_expert` for an index, but return float8 weights as they are stored."""

    @abstractmethod
    def load(self) -> Parameter:
        """Return the whole parameter in the model's dtype, contiguous; a view of the file if nothing has to be converted."""

    @abstractmethod
    def give_back(self, index: int | None = None) -> None:
        """Release the file's pages for it, or for one expert. Opened tensors stay usable; the file is read again."""


def load_parameter(parameter: Parameter | StoredParameter) -> Parameter:
    """Return a parameter, loaded if necessary."""
    return parameter.load() if isinstance(parameter, StoredParameter) else parameter


def load_all(parameters: Mapping[str, Parameter | StoredParameter]) -> dict[str, Parameter]:
    """Return all parameters loaded; shared parameters stay shared."""
    loaded: dict[int, Parameter] = {}
    for parameter in parameters.values():
        if id(parameter) not in loaded:
            loaded[id(parameter)] = load_parameter(parameter)
    return {name: loaded[id(parameter)] for name, parameter in parameters.items()}


def dense_parameters(parameters: Mapping[str, Parameter | StoredParameter], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the parameters with quantised ones dequantised to `dtype`; plain tensors are returned as they are."""
    dense: dict[int, Tensor] = {}
    for parameter in parameters.values():
        if id(parameter) not in dense:
            dense[id(parameter)] = _dense(parameter, dtype)
    return {name: dense[id(parameter)] for name, parameter in parameters.items()}


def _dense(parameter: Parameter | StoredParameter, dtype: torch.dtype) -> Tensor:
    loaded = load_parameter(parameter)
    if isinstance(loaded, Tensor):
        return loaded
    dense = loaded.dequantize(dtype)
    if isinstance(parameter, StoredParameter):
        parameter.give_back()
    return dense
