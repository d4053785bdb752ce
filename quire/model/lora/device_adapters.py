"""DeviceAdapters: the LoRA adapters of a DeviceDecoder, in tensors at fixed addresses, so that CUDA graphs read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.base.errors import InvariantError, UnsupportedError
from quire.contracts.model_spec import AttentionSpec, ModelSpec, MoeSpec
from quire.kernels.triton.lora import HeadGroups, RowGroups, add_low_rank, group_heads, group_pairs, group_rows
from quire.kernels.triton.moe import AddedProducts
from quire.model.lora.adapter import Adapter, adaptable_shapes
from quire.model.lora.device_heads import HeadMatrices
from quire.model.lora.device_shards import AdapterShard
from quire.model.lora.experts import LowRankPair, expert_shapes, is_expert, is_router
from quire.model.lora.latent import is_absorbed
from quire.model.lora.numbers import AdapterNumbers
from quire.model.parameters import shapes_with_head

_JOINED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
"""Module -> the joined layer of a DeviceLayer that it is a part of. The parts have this order."""


class _Matrices(NamedTuple):
    """Of all adapters, for one linear layer of P parts, or for each of E experts: a [adapters * E, P * R, K], and for each part
    b [adapters * E, O, R]; E is 1 where there are no experts. Rows and columns past an adapter's rank are 0."""

    a: Tensor
    b: tuple[Tensor, ...]


class _Place(NamedTuple):
    """Where the matrices of a canonical name are: the layer, the part of it, and the expert, 0 where there are none."""

    layer: str
    part: int
    expert: int = 0


class AdaptedRows(NamedTuple):
    """The rows of a step, by their adapters. Implements `AddsAdapters` of kernels/triton/step.py.

    numbers      [T] i32 of the rows' adapters; -1: none
    has_experts  [adapters] i32 flags; None: there is no room for adapters of experts
    heads        of layers with latent attention
    head_groups  the heads of the rows, by the number of heads
    """

    matrices: dict[str, _Matrices]
    groups: RowGroups
    numbers: Tensor
    has_experts: Tensor | None
    heads: dict[str, HeadMatrices]
    head_groups: dict[int, HeadGroups]

    def add_to(self, y: Tensor, x: Tensor, name: str) -> Tensor:
        """Return the output y [T, O] of a linear layer with what the adapters add for its input x [T, K]; changes y."""
        found = self.matrices.get(name)
        if found is not None:
            add_low_rank(y, x, found.a, found.b, self.groups)
        return y

    def add_to_keys(self, y: Tensor, x: Tensor, name: str) -> Tensor:
        """See AddsAdapters."""
        return self.heads[name].add_to_keys(y, x, self.head_groups[y.shape[1]])

    def add_to_values(self, y: Tensor, x: Tensor, name: str) -> Tensor:
        """See AddsAdapters."""
        return self.heads[name].add_to_values(y, x, self.head_groups[y.shape[1]])

    def of_experts(self, name: str, numbers: Tensor | None = None) -> Callable[[Tensor], AddedProducts] | None:
        """See AddsAdapters."""
        has_experts, rows = self.has_experts, self.numbers if numbers is None else numbers
        if has_experts is None:
            return None

        def of_pairs(experts: Tensor) -> AddedProducts:
            num_experts = len(self.matrices[f"{name}.down"].a) // len(has_experts)
            groups = group_pairs(rows, has_experts, experts, num_experts)

            def added(module: str, x: Tensor, num_slots: int) -> Tensor:
                found = self.matrices[f"{name}.{module}"]
                out = x.new_zeros(len(experts), sum(part.shape[1] for part in found.b))
                add_low_rank(out, x, found.a, found.b, groups, num_slots)
                return out

            return added

        return of_pairs


class DeviceAdapters:
    """Implements AdapterHolder. Its memory is that of max_loras adapters of max_rank, taken at once.

    max_loras, max_rank  see EngineConfig
    has_experts          experts can be adapted: the memory is that of adapters of all experts, too
    shard                the part of this rank, which `spec` describes; None: there is one rank
    """

    def __init__(
        self,
        spec: ModelSpec,
        max_loras: int,
        max_rank: int,
        device: torch.device,
        has_experts: bool = False,
        shard: AdapterShard | None = None,
    ) -> None:
        self._spec, self._max_loras, self._max_rank, self._shard = spec, max_loras, max_rank, shard
        self.numbers = AdapterNumbers()
        own = shapes_with_head(spec) if shard is None else shard.shapes()
        shapes, stacks = adaptable_shapes(own), expert_shapes(spec, own)
        parts: dict[str, list[tuple[int, int]]] = {}
        self._places: dict[str, _Place] = {}
        self._heads: dict[str, HeadMatrices] = {}
        for name in filter(is_absorbed, shapes):
            dtype = getattr(torch, spec.dtype)
            self._heads[name] = HeadMatrices.zeros(max_loras, max_rank, self._attention(name), dtype, device)
        for name in sorted(shapes.keys() - self._heads.keys(), key=_order):
            layer = _layer_of(name)
            sizes = parts.setdefault(layer, [])
            self._places[name] = _Place(layer, len(sizes))
            sizes.append(shapes[name])
        self._num_experts = dict.fromkeys(parts, 1)
        for layer, ((num_experts, rows, columns), num_parts) in stacks.items() if has_experts else ():
            parts[layer], self._num_experts[layer] = [(rows // num_parts, columns)] * num_parts, num_experts
            self._places |= _places_of_experts(layer, num_experts, num_parts)
        self._matrices = {
            layer: _Matrices(
                *_zeros(max_loras * self._num_experts[layer], max_rank, sizes, _dtype_of(layer, spec), device),
            )
            for layer, sizes in parts.items()
        }
        self._has_experts = torch.zeros(max_loras, dtype=torch.int32, device=device) if stacks and has_experts else None

    def tensors(self) -> list[Tensor]:
        """Return the matrices of all adapters."""
        own = [part for matrices in self._matrices.values() for part in (matrices.a, *matrices.b)]
        return [*own, *(part for matrices in self._heads.values() for part in matrices)]

    def load(self, adapter: Adapter) -> None:
        """See AdapterHolder. Raises UnsupportedError for experts without room for them, and for a layer that the model stores
        as several, whose ranks add up to more than max_rank."""
        if adapter.key in self.numbers:
            return
        number = self.numbers.next_number
        if number >= self._max_loras:
            raise InvariantError(f"there is room for {self._max_loras} adapters only")
        for name, pair in adapter.pairs.items():
            if is_expert(name) and self._has_experts is None:
                raise UnsupportedError(
                    f"the adapter is for experts of a mixture ({name}), for which a GPU takes memory at the start: set "
                    "enable_lora_experts (--enable-lora-experts), with max_loras (--max-loras) and max_lora_rank "
                    "(--max-lora-rank) as they are needed, or merge the adapter into the weights"
                )
            if len(pair.a) > self._max_rank:
                raise UnsupportedError(
                    f"{name} joins several adapted matrices, of rank {len(pair.a)} together, but max_lora_rank is "
                    f"{self._max_rank}: raise it (--max-lora-rank)"
                )
        has_experts = any(is_expert(name) for name in adapter.pairs)
        own = self._own_pairs(adapter)
        found: dict[str, list[tuple[_Place, LowRankPair]]] = {layer: [] for layer in self._matrices}
        for name, pair in own.items():
            if name in self._heads:
                continue
            place = self._places[name]
            found[place.layer].append((place, pair))
        with torch.inference_mode():
            for layer, pairs in found.items():
                if self._num_experts[layer] == 1 or has_experts:
                    self._set(layer, number, pairs)
            for name, matrices in self._heads.items():
                matrices.set(number, own.get(name), self._attention(name))
            if self._has_experts is not None:
                self._has_experts[number] = int(has_experts)
        self.numbers.set(adapter.key, number)

    def _own_pairs(self, adapter: Adapter) -> Mapping[str, LowRankPair]:
        """Return the pairs of this rank."""
        if self._shard is None:
            return adapter.pairs
        parts = [self._shard.pairs(name, pair) for name, pair in adapter.pairs.items()]
        return {name: pair for part in parts for name, pair in part.items()}

    def _set(self, layer: str, number: int, pairs: Sequence[tuple[_Place, LowRankPair]]) -> None:
        """Write the matrices of an adapter for a layer, of all its experts, and zeros where it has none."""
        matrices, count, rank = self._matrices[layer], self._num_experts[layer], self._max_rank
        own = slice(number * count, (number + 1) * count)
        a = torch.zeros(count, *matrices.a.shape[1:], dtype=matrices.a.dtype)
        b = [torch.zeros(count, *part.shape[1:], dtype=part.dtype) for part in matrices.b]
        for place, pair in pairs:
            a[place.expert, place.part * rank : place.part * rank + len(pair.a)] = pair.a
            b[place.part][place.expert, :, : len(pair.a)] = pair.b
        matrices.a[own].copy_(a)
        for part, values in zip(matrices.b, b, strict=True):
            part[own].copy_(values)

    def unload(self, key: str) -> None:
        """See AdapterHolder."""
        self.numbers.remove(key)

    def rows(self, numbers: Tensor) -> AdaptedRows:
        """Return rows of a step; numbers: [T] i32 of their adapters on the device, -1: none."""
        counts = sorted({self._attention(name).num_heads for name in self._heads})
        head_groups = {count: group_heads(numbers, self._max_loras, count) for count in counts}
        groups = group_rows(numbers, self._max_loras)
        return AdaptedRows(self._matrices, groups, numbers, self._has_experts, self._heads, head_groups)

    def _attention(self, name: str) -> AttentionSpec:
        """Return the attention of the layer that has a canonical name."""
        return self._spec.layers[int(name.split(".")[1])].attention


def _zeros(
    count: int, rank: int, sizes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the matrices of `count` adapters of a layer; sizes: [out, in] of its parts."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(count, *shape, dtype=dtype, device=device)

    return zeros(len(sizes) * rank, sizes[0][1]), tuple(zeros(rows, rank) for rows, _ in sizes)


def _dtype_of(layer: str, spec: ModelSpec) -> torch.dtype:
    """Return the dtype of a layer's inputs and outputs, which its adapters have."""
    if is_router(layer):
        mlp = spec.layers[int(layer.split(".")[1])].mlp
        if isinstance(mlp, MoeSpec) and mlp.is_router_f32:
            return torch.float32
    return getattr(torch, spec.dtype)


def _places_of_experts(layer: str, num_experts: int, num_parts: int) -> dict[str, _Place]:
    """Return canonical name -> place of the linear layers of all experts of a stack."""
    stem, _, kind = layer.rpartition(".")
    modules = ("down",) if kind == "down" else ("gate", "up")[-num_parts:]
    return {
        f"{stem}.{expert}.{module}": _Place(layer, part, expert)
        for expert in range(num_experts)
        for part, module in enumerate(modules)
    }


def _order(name: str) -> tuple[str, int]:
    """Return a key by which the parts of a joined layer come in their order."""
    module = name.rpartition(".")[2]
    return _layer_of(name), list(_JOINED).index(module) if module in _JOINED else 0


def _layer_of(name: str) -> str:
    """Return the name of the linear layer of a DeviceLayer that has a module."""
    prefix, separator, module = name.rpartition(".")
    return f"{prefix}{separator}{_JOINED.get(module, module)}"
