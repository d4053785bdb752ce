"""PoolingHead: what a checkpoint has after the pooled hidden state: dense layers, and the logits of classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import ModelFormatError
from quire.contracts.memory import ModelReport
from quire.contracts.pooler_spec import Activation, HeadLayerSpec, PoolerSpec
from quire.model.families import FAMILIES
from quire.model.stored_tensors import open_file, open_tensors

Vector = NDArray[np.float64]


def _erf_gelu(x: Vector) -> Vector:
    return x * 0.5 * (1.0 + np.array([math.erf(value / math.sqrt(2.0)) for value in x]))


def _tanh_gelu(x: Vector) -> Vector:
    return x * 0.5 * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _sigmoid(x: Vector) -> Vector:
    return np.exp(-np.logaddexp(0.0, -x))  # which does not overflow


def _softmax(x: Vector) -> Vector:
    powers = np.exp(x - x.max())
    return powers / powers.sum()


_FUNCTIONS: dict[Activation, Callable[[Vector], Vector]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "gelu": _erf_gelu,
    "gelu_tanh": _tanh_gelu,
    "relu": lambda x: np.maximum(x, 0.0),
    "silu": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
    "softmax": _softmax,
}


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer with its parameters, f64."""

    spec: HeadLayerSpec
    weight: Vector
    bias: Vector | None

    def apply(self, x: Vector) -> Vector:
        """Return the layer's output of one vector."""
        # One vector at a time: its bits do not depend on the others of a step.
        x = self.weight @ x
        return _FUNCTIONS[self.spec.activation](x if self.bias is None else x + self.bias)


class PoolingHead:
    """The layers of one checkpoint, applied on the host to one pooled hidden state at a time, in f64."""

    def __init__(self, layers: Sequence[_Layer], activation: Activation) -> None:
        self._layers = tuple(layers)
        self._activation = activation

    def apply(self, pooled: Vector) -> Vector:
        """Return the vector, or the logits, that the layers make of a pooled hidden state."""
        for layer in self._layers:
            pooled = layer.apply(pooled)
        return pooled

    def activate(self, logits: Vector) -> Vector:
        """Return the scores of classes."""
        return _FUNCTIONS[self._activation](logits)


def load_pooling_head(report: ModelReport) -> PoolingHead | None:
    """Return the head of a checkpoint, None where hidden states are its results. Raises ModelFormatError."""
    spec = report.pooler
    if not spec.layers and not spec.token_ids:
        return None
    own = _own_tensors(report)
    size = report.spec.hidden_size
    layers: list[_Layer] = []
    for layer in spec.layers:
        weight = _find(report.folder, own, layer.weight)
        bias = None if layer.bias is None else _find(report.folder, own, layer.bias)
        if weight.ndim != 2:
            raise ModelFormatError(
                f"{report.folder / layer.weight[0]}: {layer.weight[1]} has {weight.ndim} dimensions, expected 2"
            )
        rows = weight.shape[0]
        _check_shape(report.folder, layer.weight, weight, (rows, size))
        if layer.bias is not None and bias is not None:
            _check_shape(report.folder, layer.bias, bias, (rows,))
        layers.append(_Layer(layer, weight, bias))
        size = rows
    if spec.token_ids:
        layers.append(_token_layer(spec, own, report.folder))
        size = 1
    if spec.size is not None and size != spec.size:
        raise ModelFormatError(
            f"{report.folder}: the last layer has {size} outputs, but the config says {spec.size}: id2label or num_labels of a "
            "classifier, out_features of a Dense module"
        )
    return PoolingHead(layers, spec.activation)


def _own_tensors(report: ModelReport) -> dict[str, Tensor]:
    page = FAMILIES.get(report.spec.model_type)
    stored = open_tensors(report.folder)
    return {page.strip(name): tensor for name, tensor in stored.items() if isinstance(tensor, Tensor)}


def _token_layer(spec: PoolerSpec, own: dict[str, Tensor], folder: Path) -> _Layer:
    """Return the layer whose one row is that of a token in the LM head, or the difference of two."""
    head = own.get("lm_head.weight", own.get("embed_tokens.weight"))
    if head is None or not head.is_floating_point() or max(spec.token_ids) >= head.shape[0]:
        raise ModelFormatError(f"{folder} has no LM head with the tokens {list(spec.token_ids)} of classifier_from_token")
    rows = [head[token_id].double().numpy() for token_id in spec.token_ids]
    weight = rows[0] if len(rows) == 1 else rows[1] - rows[0]
    return _Layer(HeadLayerSpec(("", "lm_head.weight")), weight[None], None)


def _find(folder: Path, own: dict[str, Tensor], place: tuple[str, str]) -> Vector:
    file, name = place
    tensors = own if not file else open_file(folder / file, None)
    tensor = tensors.get(name)
    if tensor is None:
        raise ModelFormatError(f"{folder / file if file else folder} has no {name}, which the head of the model needs")
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ModelFormatError(f"{folder / file if file else folder}: {name} must be of floats, got {tensor.dtype}")
    return tensor.double().numpy()


def _check_shape(folder: Path, place: tuple[str, str], found: Vector, expected: tuple[int, ...]) -> None:
    if found.shape != expected:
        raise ModelFormatError(f"{folder / place[0]}: {place[1]} has {list(found.shape)}, expected {list(expected)}")
