"""The weights of a model on a device, streamed there one by one, with those joined that read the same input."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from quire.base.errors import InvariantError
from quire.contracts.model_spec import ModelSpec
from quire.model.parameters import Shape, parameter_shapes
from quire.quant.parameters import Parameter, QuantizedStack, StoredParameter
from quire.quant.weight import QuantizedWeight

_PROGRESS_DELAY_S = 3.0
_JOINED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}


@dataclass(frozen=True, slots=True)
class _Place:
    """Rows [start, start + count) of a tensor on the device, which has another name where it is joined."""

    name: str
    start: int
    count: int


def load_on_device(
    parameters: MutableMapping[str, Parameter | StoredParameter], spec: ModelSpec, device: torch.device
) -> dict[str, Tensor]:
    """Return every parameter dense, in the model's dtype, on a device; `parameters` is emptied on the way.

    The host holds one parameter, or one expert, at a time beside the checkpoint's own pages, which are given back. Where q, k
    and v are there, layers.N.qkv holds their rows, one after the other, and gate_up those of gate and up. Two names of one
    parameter stay one tensor.
    """
    dtype: torch.dtype = getattr(torch, spec.dtype)
    shapes = parameter_shapes(spec)
    shapes |= {name: shapes["embed.weight"] for name in ("lm_head.weight",) if name in parameters and name not in shapes}
    places = _places(shapes)
    sizes: dict[str, int] = {}
    for place in places.values():
        sizes[place.name] = max(sizes.get(place.name, 0), place.start + place.count)
    placed: dict[str, Tensor] = {}
    by_identity: dict[int, str] = {}
    owned: list[Parameter | StoredParameter] = []  # so that no identity is used twice
    for name in tqdm(list(parameters), "loading weights", delay=_PROGRESS_DELAY_S, disable=None, leave=False):
        parameter, place = parameters.pop(name), places[name]
        twin = by_identity.get(id(parameter))
        if twin is not None:
            placed[place.name] = placed[twin]
            continue
        if place.name not in placed:
            placed[place.name] = torch.empty(sizes[place.name], *shapes[name][1:], dtype=dtype, device=device)
        if name in ("embed.weight", "lm_head.weight"):
            by_identity[id(parameter)] = place.name
            owned.append(parameter)
        _copy(parameter, placed[place.name][place.start : place.start + place.count], name)
    return placed


def _places(shapes: Mapping[str, Shape]) -> dict[str, _Place]:
    found: dict[str, _Place] = {}
    ends: dict[str, int] = {}
    for name, shape in shapes.items():  # q, k, v and gate, up come in this order
        parts = name.split(".")
        if len(parts) == 4 and parts[0] == "layers" and parts[2] in _JOINED:
            parts[2] = _JOINED[parts[2]]
        joined = ".".join(parts)
        start = ends.get(joined, 0)
        found[name] = _Place(joined, start, shape[0])
        ends[joined] = start + shape[0]
    return found


def _copy(parameter: Parameter | StoredParameter, out: Tensor, name: str) -> None:
    """Fill `out` on the device; stacks expert by expert."""
    if out.ndim == 3 and not isinstance(parameter, Tensor):
        for index in range(len(out)):
            _copy_one(_expert(parameter, index), out[index], name)
            if isinstance(parameter, StoredParameter):
                parameter.give_back(index)
        return
    opened = parameter.open() if isinstance(parameter, StoredParameter) else parameter
    if isinstance(opened, QuantizedStack):
        raise InvariantError(f"{name} is a stack of weights")
    _copy_one(opened, out, name)
    if isinstance(parameter, StoredParameter):
        parameter.give_back()


def _expert(parameter: Parameter | StoredParameter, index: int) -> Tensor | QuantizedWeight:
    if isinstance(parameter, StoredParameter):
        return parameter.open_expert(index)
    if isinstance(parameter, QuantizedStack):
        return parameter.weights[index]
    raise InvariantError(f"experts are a stack, got {type(parameter).__name__}")


def _copy_one(weight: Tensor | QuantizedWeight, out: Tensor, name: str) -> None:
    dense = weight if isinstance(weight, Tensor) else weight.dequantize(out.dtype)
    if dense.shape != out.shape:
        raise InvariantError(f"{name} is {tuple(dense.shape)}, its place on the device {tuple(out.shape)}")
    out.copy_(dense)
