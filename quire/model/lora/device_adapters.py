"""DeviceAdapters: the LoRA adapters of a DeviceDecoder, in tensors at fixed addresses, so that CUDA graphs read them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.base.errors import InvariantError, UnsupportedError
from quire.contracts.model_spec import ModelSpec
from quire.kernels.triton.lora import RowGroups, add_low_rank, group_rows
from quire.model.lora.adapter import Adapter, adaptable_shapes
from quire.model.lora.experts import LowRankPair, is_expert, is_router
from quire.model.lora.numbers import AdapterNumbers
from quire.model.parameters import parameter_shapes

_JOINED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
"""Module -> the joined layer of a DeviceLayer that it is a part of. The parts have this order."""


class _Matrices(NamedTuple):
    """Of all adapters, for one linear layer of P parts: a [adapters, P * R, K], and for each part b [adapters, O, R]; rows and
    columns past an adapter's rank are 0."""

    a: Tensor
    b: tuple[Tensor, ...]


class AdaptedRows(NamedTuple):
    """The rows of a step, by their adapters. Implements `AddsAdapters` of kernels/triton/step.py."""

    matrices: dict[str, _Matrices]
    groups: RowGroups

    def add_to(self, y: Tensor, x: Tensor, name: str) -> Tensor:
        """Return the output y [T, O] of a linear layer with what the adapters add for its input x [T, K]; changes y."""
        found = self.matrices.get(name)
        if found is not None:
            add_low_rank(y, x, found.a, found.b, self.groups)
        return y


class DeviceAdapters:
    """Implements AdapterHolder. Its memory is that of max_loras adapters of max_rank, taken at once.

    max_loras, max_rank  see EngineConfig
    """

    def __init__(self, spec: ModelSpec, max_loras: int, max_rank: int, device: torch.device) -> None:
        self._max_loras, self._max_rank = max_loras, max_rank
        self.numbers = AdapterNumbers()
        shapes = adaptable_shapes({"lm_head.weight": (spec.vocab_size, spec.hidden_size), **parameter_shapes(spec)})
        parts: dict[str, list[tuple[int, int]]] = {}
        self._places: dict[str, tuple[str, int]] = {}
        for name in sorted((name for name in shapes if not is_router(name)), key=_order):
            layer = _layer_of(name)
            own = parts.setdefault(layer, [])
            self._places[name] = layer, len(own)
            own.append(shapes[name])
        dtype: torch.dtype = getattr(torch, spec.dtype)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(max_loras, *shape, dtype=dtype, device=device)

        self._matrices = {
            layer: _Matrices(zeros(len(sizes) * max_rank, sizes[0][1]), tuple(zeros(rows, max_rank) for rows, _ in sizes))
            for layer, sizes in parts.items()
        }

    def tensors(self) -> list[Tensor]:
        """Return the matrices of all adapters."""
        return [part for matrices in self._matrices.values() for part in (matrices.a, *matrices.b)]

    def load(self, adapter: Adapter) -> None:
        """See AdapterHolder. Raises UnsupportedError for experts and routers, and for a layer that the model stores as several,
        whose ranks add up to more than max_rank."""
        if adapter.key in self.numbers:
            return
        number = self.numbers.next_number
        if number >= self._max_loras:
            raise InvariantError(f"there is room for {self._max_loras} adapters only")
        for name, pair in adapter.pairs.items():
            if is_expert(name) or is_router(name):
                raise UnsupportedError(
                    f"the adapter is for experts or routers of a mixture ({name}), which is supported on CPUs only (device "
                    "'cpu'): merge it into the weights"
                )
            if len(pair.a) > self._max_rank:
                raise UnsupportedError(
                    f"{name} joins several adapted matrices, of rank {len(pair.a)} together, but max_lora_rank is "
                    f"{self._max_rank}: raise it (--max-lora-rank)"
                )
        with torch.inference_mode():
            for name, (layer, part) in self._places.items():
                self._set(self._matrices[layer], part, number, adapter.pairs.get(name))
        self.numbers.set(adapter.key, number)

    def _set(self, matrices: _Matrices, part: int, number: int, pair: LowRankPair | None) -> None:
        a = matrices.a[number, part * self._max_rank : (part + 1) * self._max_rank]
        b = matrices.b[part][number]
        a.zero_()
        b.zero_()
        if pair is not None:
            a[: len(pair.a)].copy_(pair.a)
            b[:, : len(pair.a)].copy_(pair.b)

    def unload(self, key: str) -> None:
        """See AdapterHolder."""
        self.numbers.remove(key)

    def rows(self, numbers: Tensor) -> AdaptedRows:
        """Return rows of a step; numbers: [T] i32 of their adapters on the device, -1: none."""
        return AdaptedRows(self._matrices, group_rows(numbers, self._max_loras))


def _order(name: str) -> tuple[str, int]:
    """Return a key by which the parts of a joined layer come in their order."""
    module = name.rpartition(".")[2]
    return _layer_of(name), list(_JOINED).index(module) if module in _JOINED else 0


def _layer_of(name: str) -> str:
    """Return the name of the linear layer of a DeviceLayer that has a module."""
    prefix, separator, module = name.rpartition(".")
    return f"{prefix}{separator}{_JOINED.get(module, module)}"
