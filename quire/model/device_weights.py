"""The weights of a model on a device: loaded one by one, with weights that read the same input joined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from quire.base.errors import InvariantError
from quire.base.logging import get_logger
from quire.contracts.model_spec import ModelSpec
from quire.kernels.triton.quantized_weights import (
    FLOAT4_LEVELS,
    DeviceQuantizedWeight,
    fits_kernels,
    join_rows,
    pack_float4,
    pack_float8,
    pack_integers,
)
from quire.model.device_copies import DeviceCopies
from quire.model.device_linear import DeviceWeight
from quire.model.device_offload import OffloadedWeights
from quire.model.device_shards import DeviceShard, Opened, reason_not_to_take_columns, take_columns, take_rows
from quire.model.parameters import Shape, float32_parameters, parameter_shapes
from quire.quant.float8 import Float8Weight
from quire.quant.parameters import Parameter, QuantizedStack, StoredParameter
from quire.quant.policy import ParameterQuantizer
from quire.quant.weight import QuantizedWeight

logger = get_logger(__name__)

_PROGRESS_DELAY_S = 3.0
_JOINED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
_LINEARS = ("qkv", "o", "gate_up", "down", "q_a", "kv_a", "latent_in", "latent_out")
_ENDS = ("embed.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """The parameters of a model on a device.

    tensors  parameters that are always dense: norms, biases, positions, routers
    linears  the weights of linear layers, the embedding and the head, each in parts of rows; the rows of q, k and v are joined
                  as layers.N.qkv, and those of gate and up as gate_up
    experts  of a layer: [E, O, K], or quantised, with the rows of all experts one after the other
    whole_rows    of a tensor-parallel rank: rows of each part of `linears` on all ranks together
    row_parallel  names in `linears` and `experts` of weights that are cut by their inputs
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    linears: dict[str, tuple[DeviceWeight, ...]] = field(default_factory=dict)
    experts: dict[str, Tensor | DeviceQuantizedWeight] = field(default_factory=dict)
    whole_rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    row_parallel: set[str] = field(default_factory=set)

    def all_tensors(self) -> Iterator[Tensor]:
        """Yield every tensor; some may share memory."""
        yield from self.tensors.values()
        for weight in (*(part for parts in self.linears.values() for part in parts), *self.experts.values()):
            yield from tensors_of(weight)


def tensors_of(weight: DeviceWeight) -> Iterator[Tensor]:
    """Yield the tensors of one weight."""
    if isinstance(weight, Tensor):
        yield weight
        return
    yield from (part for part in (weight.codes, weight.scales, weight.offsets, weight.columns) if part is not None)


@dataclass(frozen=True, slots=True)
class _Place:
    """Rows [start, start + count) of a tensor on the device, which has another name if it is joined.

    whole  rows of the parameter on all ranks together
    """

    name: str
    start: int
    count: int
    whole: int


def load_on_device(
    parameters: MutableMapping[str, Parameter | StoredParameter],
    spec: ModelSpec,
    device: torch.device,
    quantize: ParameterQuantizer | None = None,
    shapes: Mapping[str, Shape] | None = None,
    shard: DeviceShard | None = None,
    offload: OffloadedWeights | None = None,
) -> DeviceWeights:
    """Return every parameter on a device, quantised if stored so, otherwise in the model's dtype; `parameters` is emptied.

    The host holds one parameter, or one expert, at a time in addition to the checkpoint's pages, which are released. An LM head
    that is the embedding stays shared, and so do weights of two layers, unless there is a shard or layers are offloaded.
    Quantised weights that no kernel
    supports are dequantised, with a log line.

    quantize  applied on the device to every weight that is dense in the checkpoint, to each expert separately
    shapes    of the parameters, q before k before v and gate before up; None: those of the spec
    shard     the part of this rank of a tensor-parallel model; None: all
    offload   takes the weights of its layers to the host as soon as each is complete; None: all stay on the device
    """
    return _Loader(parameters, spec, device, quantize, shapes, shard).load(offload)


class _Loader:
    def __init__(
        self,
        parameters: MutableMapping[str, Parameter | StoredParameter],
        spec: ModelSpec,
        device: torch.device,
        quantize: ParameterQuantizer | None,
        shapes: Mapping[str, Shape] | None,
        shard: DeviceShard | None,
    ) -> None:
        self._parameters, self._device, self._quantize, self._shard = parameters, device, quantize, shard
        self._copies = DeviceCopies.to(device)
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._exact = float32_parameters(spec)
        shapes = dict(parameter_shapes(spec) if shapes is None else shapes)
        shapes |= {name: shapes["embed.weight"] for name in _ENDS[1:] if name in parameters and name not in shapes}
        whole = {name: shape[0] for name, shape in shapes.items()}
        if shard is not None:
            own = shard.shapes()
            shapes |= {name: own.get(name, own["embed.weight"]) for name in shapes}
        self._shapes, self._places = shapes, _places(shapes, whole)
        self._sizes: dict[str, int] = {}
        for place in self._places.values():
            self._sizes[place.name] = max(self._sizes.get(place.name, 0), place.start + place.count)
        self._dense: dict[str, Tensor] = {}
        self._parts: dict[str, list[tuple[_Place, DeviceQuantizedWeight | None]]] = {}
        self._row_parallel: set[str] = set()
        self._cut_by_outputs: dict[str, list[str]] = {}
        self._widened: dict[str, list[str]] = {}
        self._orders: dict[bytes, Tensor] = {}

    def load(self, offload: OffloadedWeights | None) -> DeviceWeights:
        found = DeviceWeights()
        twins: dict[int, str] = {}
        owned: list[Parameter | StoredParameter] = []  # keeps objects alive, so that no id() is reused
        shared = {} if offload is not None or self._shard is not None else self._find_shared()
        # A bias is cut as its weight was.
        names = sorted(self._parameters, key=lambda name: self._shard is not None and name.endswith(".bias"))
        for name in tqdm(names, "loading weights", delay=_PROGRESS_DELAY_S, disable=None, leave=False):
            parameter, place = self._parameters.pop(name), self._places[name]
            if place.name in shared:
                continue
            if name in _ENDS:
                owned.append(parameter)
                twin = twins.setdefault(id(parameter), name)
                if twin != name:
                    found.linears[name] = found.linears[twin]
                    found.whole_rows[name] = found.whole_rows[twin]
                    continue
            if len(self._shapes[name]) == 3 and not name.endswith("conv.weight"):
                found.experts[name] = self._place_experts(parameter, name)
                if offload is not None:
                    offload.take(name, (found.experts[name],))
            elif _is_linear(place.name):
                self._place_rows(parameter, place, name)
                place = self._places[name]
                if place.start + place.count == self._sizes[place.name]:
                    found.linears[place.name], found.whole_rows[place.name] = self._finish(place.name)
                    if offload is not None:
                        offload.take(place.name, found.linears[place.name])
            else:
                # Biases of experts and norms of heads are joined from those of each: no view of what is stored.
                is_stack = len(self._shapes[name]) > 1 and name != "pos.weight"
                opened = parameter.load() if is_stack and isinstance(parameter, StoredParameter) else parameter
                opened = opened.open() if isinstance(opened, StoredParameter) else opened
                if isinstance(opened, QuantizedStack):
                    raise InvariantError(f"{name} is a stack of weights")
                opened = self._own_part(opened, name)
                if opened is None:
                    continue
                self._copy(opened, place, name)
                found.tensors[place.name] = self._dense[place.name]
            if isinstance(parameter, StoredParameter):
                parameter.give_back()
        self._copies.finish()
        if offload is not None:
            offload.finish()
        for name, first in shared.items():
            if first in found.linears:
                found.linears[name], found.whole_rows[name] = found.linears[first], found.whole_rows[first]
            else:
                found.tensors[name] = found.tensors[first]
        found.row_parallel.update(self._row_parallel)
        self._log_shards()
        for reason, names in self._widened.items():
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            logger.warning("%d weights take more memory: run in %s, as %s: %s", len(names), self._dtype, reason, shown)
        return found

    def _find_shared(self) -> dict[str, str]:
        """Return which weights of layers are others, too, mostly of an earlier layer: name -> the earlier name, both joined."""
        kinds: dict[str, list[object]] = {}
        for name, parameter in sorted(self._parameters.items()):
            if name.startswith("layers.") and len(self._shapes[name]) < 3:
                scheme = self._quantize and self._quantize.scheme_of(name, self._shapes[name][-1])
                kinds.setdefault(self._places[name].name, []).append((id(parameter), scheme, name in self._exact))
        firsts: dict[tuple[object, ...], str] = {}
        found = {name: firsts.setdefault(tuple(kind), name) for name, kind in kinds.items()}
        return {name: first for name, first in found.items() if name != first}

    def _place_rows(self, parameter: Parameter | StoredParameter, place: _Place, name: str) -> None:
        opened = parameter.open_quantized() if isinstance(parameter, StoredParameter) else parameter
        if isinstance(opened, QuantizedStack):
            raise InvariantError(f"{name} is a stack of weights")
        opened = self._sharded(opened, name)
        place = self._places[name]
        packed = self._open_quantized(opened, name)
        if packed is None:
            self._copy(opened, place, name)
        elif packed.shape != self._shapes[name]:
            raise InvariantError(f"{name} is {packed.shape}, its place on the device {self._shapes[name]}")
        self._parts.setdefault(place.name, []).append((place, packed))

    def _sharded(self, weight: Opened, name: str) -> Opened:
        """Return this rank's part of a linear weight, or of an expert's, quantised if requested.

        A weight that is cut by its inputs is quantised as a whole, so that it has the values of a single rank; its place is
        set.
        """
        if self._shard is None:
            return self._quantized(weight, name)
        if not self._shard.is_row_parallel(name):
            return self._quantized(self._take_outputs(weight, name), name)
        weight, columns = self._quantized(weight, name), self._shard.columns(name)
        reason = reason_not_to_take_columns(weight, columns)
        if reason is None:
            self._row_parallel.add(name)
            self._set_shape(name, weight.shape[0], columns[self._shard.rank].size)
            return take_columns(weight, columns[self._shard.rank])
        if name in self._row_parallel:
            raise InvariantError(f"one expert of {name} is cut by its inputs, and another cannot be: {reason}")
        names = self._cut_by_outputs.setdefault(reason, [])
        if name not in names:
            names.append(name)
        return self._take_outputs(weight, name)

    def _take_outputs(self, weight: Opened, name: str) -> Opened:
        rows = None if self._shard is None else self._shard.rows(name, weight.shape[0])
        if rows is None:
            return weight
        self._set_shape(name, sum(part.size for part in rows), weight.shape[1])
        return take_rows(weight, rows)

    def _set_shape(self, name: str, num_rows: int, num_columns: int) -> None:
        self._shapes[name] = (*self._shapes[name][:-2], num_rows, num_columns)
        place = self._places[name]
        if len(self._shapes[name]) == 2 and place.count != num_rows:
            self._places[name] = replace(place, count=num_rows)
            self._sizes[place.name] = num_rows  # of o or down, which are joined with nothing

    def _own_part(self, tensor: Opened, name: str) -> Opened | None:
        """Return this rank's part of a dense parameter; None if it has none, such as a bias of an all-reduce, which rank 0
        adds."""
        shard = self._shard
        if shard is None:
            return tensor
        tensor = tensor if isinstance(tensor, Tensor) else tensor.dequantize(self._dtype)
        experts = shard.own_experts(name)
        if experts is not None:
            return tensor[list(experts)]
        is_stack = ".experts." in name
        is_of_sum = f"{name.removesuffix('bias')}weight" in self._row_parallel and name.endswith(".bias")
        rows = None if is_of_sum else shard.rows(name, tensor.shape[-1] if is_stack else tensor.shape[0])
        if is_stack:
            if is_of_sum:
                self._shapes[name] = tuple(tensor.shape)
                return tensor if shard.rank == 0 else torch.zeros_like(tensor)
            if rows is None:
                raise InvariantError(f"{name} of experts is on every rank")
            self._shapes[name] = (tensor.shape[0], sum(part.size for part in rows))
            return torch.cat([tensor[:, part.start : part.stop] for part in rows], 1)
        if is_of_sum:
            return tensor if shard.rank == 0 else None
        if rows is None:
            return tensor
        self._set_num_rows(name, sum(part.size for part in rows))
        return take_rows(tensor, rows)

    def _set_num_rows(self, name: str, num_rows: int) -> None:
        """Set the rows of a bias, or of a norm of each head, that this rank has."""
        self._shapes[name] = (num_rows, *self._shapes[name][1:])
        place = self._places[name]
        if place.count != num_rows:
            self._places[name] = replace(place, count=num_rows)
            self._sizes[place.name] = num_rows

    def _log_shards(self) -> None:
        for reason, names in self._cut_by_outputs.items():
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            logger.warning("%d weights are cut by their outputs, not their inputs, as %s: %s", len(names), reason, shown)

    def _finish(self, name: str) -> tuple[tuple[DeviceWeight, ...], tuple[int, ...]]:
        """Return the parts of a weight, merged as far as possible, and the rows of each on all ranks together."""
        parts: list[DeviceWeight] = []
        whole_rows: list[int] = []
        runs: list[tuple[int, int]] = []  # of dense rows
        for place, packed in self._parts.pop(name):
            end = place.start + place.count
            if packed is None and parts and isinstance(parts[-1], Tensor):
                runs[-1] = (runs[-1][0], end)
                parts[-1] = self._dense[name][slice(*runs[-1])]
                whole_rows[-1] += place.whole
            elif packed is None:
                runs.append((place.start, end))
                parts.append(self._dense[name][place.start : end])
                whole_rows.append(place.whole)
            else:
                last = parts[-1] if parts else None
                joined = join_rows([last, packed]) if isinstance(last, DeviceQuantizedWeight) else None
                if joined is None:
                    parts.append(packed)
                    whole_rows.append(place.whole)
                else:
                    parts[-1] = joined
                    whole_rows[-1] += place.whole
        self._dense.pop(name, None)
        return tuple(parts), tuple(whole_rows)

    def _quantized(self, weight: Opened, name: str) -> Opened:
        if self._quantize is None or not isinstance(weight, Tensor):
            return weight
        return self._quantize.quantized(name, self._copies.upload(weight))

    def _open_quantized(self, weight: Opened, name: str) -> DeviceQuantizedWeight | None:
        """Return a weight in the form of the kernels, on the device, or None if it must be dense."""
        if isinstance(weight, Tensor):
            return None
        num_columns = weight.shape[1]
        group_size = weight.block[1] if isinstance(weight, Float8Weight) else weight.group_size
        if not fits_kernels(group_size, num_columns):
            return self._say(f"kernels take scales of multiples of 32 columns, not of {group_size}", name)
        if name in _ENDS and isinstance(weight, QuantizedWeight) and weight.columns is not None:
            return self._say("the columns of an embedding or a head must be in order", name)
        if isinstance(weight, Float8Weight):
            codes, scale = (self._copies.upload(part).contiguous() for part in (weight.codes, weight.scale))
            return pack_float8(codes, scale, weight.block)
        offset = None if weight.offset is None else self._copies.upload(weight.offset)
        limits = (-128, 127) if weight.levels is None else (weight.levels[0], weight.levels[-1])
        codes, scale = self._copies.upload(weight.codes).contiguous(), self._copies.upload(weight.scale)
        is_float4 = weight.levels == FLOAT4_LEVELS and offset is None
        packed = pack_float4(codes, scale) if is_float4 else pack_integers(codes, scale, offset, limits)
        return packed if weight.columns is None else replace(packed, columns=self._order(weight.columns))

    def _order(self, columns: Tensor) -> Tensor:
        """Return an order of columns on the device, one tensor for all equal ones."""
        content = columns.cpu().numpy().tobytes()
        if content not in self._orders:
            self._orders[content] = self._copies.upload(columns)
        return self._orders[content]

    def _say(self, reason: str, name: str) -> None:
        names = self._widened.setdefault(reason, [])
        if name not in names:
            names.append(name)

    def _place_experts(self, parameter: Parameter | StoredParameter, name: str) -> Tensor | DeviceQuantizedWeight:
        """Return a stack of experts, quantised if all have the same kind, filled expert by expert."""
        shape = self._shapes[name]
        stack: DeviceQuantizedWeight | None = None
        own = None if self._shard is None else self._shard.own_experts(name)
        experts = range(shape[0]) if own is None else own
        for place, index in enumerate(experts):
            packed = self._open_quantized(self._sharded(_expert(parameter, index, True), name), name)
            shape = self._shapes[name]
            stack = None if packed is None else self._put(stack, packed, place, shape, name)
            if isinstance(parameter, StoredParameter):
                parameter.give_back(index)
            if stack is None:
                break
        if stack is not None:
            return stack
        dense = torch.empty(shape, dtype=self._dtype, device=self._device)
        for place, index in enumerate(experts):
            self._copy_one(self._own_expert(_expert(parameter, index, False), name), dense[place], name)
            if isinstance(parameter, StoredParameter):
                parameter.give_back(index)
        return dense

    def _own_expert(self, weight: Opened, name: str) -> Opened:
        """Return this rank's part of a dense expert, cut like the first one."""
        if self._shard is None:
            return weight
        if name in self._row_parallel:
            dense = weight if isinstance(weight, Tensor) else weight.dequantize(self._dtype)
            return take_columns(dense, self._shard.columns(name)[self._shard.rank])
        return self._take_outputs(weight, name)

    def _put(
        self, stack: DeviceQuantizedWeight | None, expert: DeviceQuantizedWeight, index: int, shape: Shape, name: str
    ) -> DeviceQuantizedWeight | None:
        """Add an expert to the stack and return it, or None, with a reason for the log, if the expert has another kind."""
        if expert.shape != shape[1:]:
            raise InvariantError(f"an expert of {name} is {expert.shape}, its place on the device {shape[1:]}")
        if expert.columns is not None:
            return self._say("the columns of experts must be in order", name)
        if shape[1] % expert.scale_rows:
            expert = expert.by_row()
        if stack is None:
            stack = _stack_like(expert, shape[0])
        like = replace(expert, codes=stack.codes, scales=stack.scales, offsets=stack.offsets)
        if like != stack or expert.codes.dtype != stack.codes.dtype:
            return self._say("the experts of a layer must have one kind of weights", name)
        if expert.offsets is not None and stack.offsets is None:
            stack = replace(stack, offsets=torch.zeros_like(stack.scales))
        put_expert(stack, expert, index)
        return stack

    def _copy(self, weight: Opened, place: _Place, name: str) -> None:
        """Fill the place of a dense parameter."""
        if place.name not in self._dense:
            size = (self._sizes[place.name], *self._shapes[name][1:])
            dtype = torch.float32 if name in self._exact else self._dtype
            self._dense[place.name] = torch.empty(size, dtype=dtype, device=self._device)
        self._copy_one(weight, self._dense[place.name][place.start : place.start + place.count], name)

    def _copy_one(self, weight: Opened, out: Tensor, name: str) -> None:
        dense = weight if isinstance(weight, Tensor) else weight.dequantize(out.dtype)
        if dense.shape != out.shape:
            raise InvariantError(f"{name} is {tuple(dense.shape)}, its place on the device {tuple(out.shape)}")
        self._copies.fill(out, dense)


def put_expert(stack: Tensor | DeviceQuantizedWeight, expert: Tensor | DeviceQuantizedWeight, index: int) -> None:
    """Copy the weights of an expert, [O, K] or quantised, into a stack of its form; see can_put_expert."""
    if isinstance(stack, Tensor) and isinstance(expert, Tensor):
        stack[index].copy_(expert)
        return
    assert isinstance(stack, DeviceQuantizedWeight)
    assert isinstance(expert, DeviceQuantizedWeight)
    for whole, part in ((stack.codes, expert.codes), (stack.scales, expert.scales), (stack.offsets, expert.offsets)):
        if whole is not None and part is not None:
            rows = whole[index * len(part) : (index + 1) * len(part)]
            is_byte = part.itemsize == 1  # not every operation supports float8
            (rows.view(torch.uint8) if is_byte else rows).copy_(part.view(torch.uint8) if is_byte else part)
        elif whole is not None:
            rows = len(whole) * expert.shape[0] // stack.shape[0]
            whole[index * rows : (index + 1) * rows].zero_()


def can_put_expert(stack: Tensor | DeviceQuantizedWeight, expert: Tensor | DeviceQuantizedWeight) -> bool:
    """Return whether an expert has the form of a stack."""
    if isinstance(stack, Tensor) or isinstance(expert, Tensor):
        return isinstance(stack, Tensor) and isinstance(expert, Tensor)
    has_room = stack.offsets is not None or expert.offsets is None
    like = replace(expert, codes=stack.codes, scales=stack.scales, offsets=stack.offsets)
    return has_room and like == stack and expert.codes.dtype == stack.codes.dtype


def _is_linear(name: str) -> bool:
    """Return whether a joined name is that of a weight that kernels may run quantised."""
    parts = name.split(".")
    return name in _ENDS or (_is_projection(parts) and parts[-2] in _LINEARS and parts[-1] == "weight")


def _is_projection(parts: list[str]) -> bool:
    """Return whether a name in parts is that of a projection, or of one of a shared expert."""
    return parts[0] == "layers" and (len(parts) == 4 or (len(parts) == 5 and parts[2] == "shared"))


def _places(shapes: Mapping[str, Shape], whole: Mapping[str, int]) -> dict[str, _Place]:
    found: dict[str, _Place] = {}
    ends: dict[str, int] = {}
    for name, shape in shapes.items():  # q, k, v and gate, up come in this order
        parts = name.split(".")
        if _is_projection(parts) and parts[-2] in _JOINED:
            parts[-2] = _JOINED[parts[-2]]
        joined = ".".join(parts)
        start = ends.get(joined, 0)
        found[name] = _Place(joined, start, shape[0], whole[name])
        ends[joined] = start + shape[0]
    return found


def _stack_like(expert: DeviceQuantizedWeight, num_experts: int) -> DeviceQuantizedWeight:
    """Return an empty stack of experts of that kind, the rows of all one after the other."""

    def repeated(part: Tensor) -> Tensor:
        return torch.empty(num_experts * len(part), *part.shape[1:], dtype=part.dtype, device=part.device)

    offsets = None if expert.offsets is None else torch.zeros_like(repeated(expert.offsets))
    return replace(expert, codes=repeated(expert.codes), scales=repeated(expert.scales), offsets=offsets)


def _expert(parameter: Parameter | StoredParameter, index: int, is_packed: bool) -> Opened:
    if isinstance(parameter, StoredParameter):
        return parameter.open_quantized(index) if is_packed else parameter.open_expert(index)
    if isinstance(parameter, QuantizedStack):
        return parameter.weights[index]
    if isinstance(parameter, Tensor):
        return parameter[index]
    raise InvariantError(f"experts are a stack, got {type(parameter).__name__}")


T = TypeVar("T")


def under(named: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Return the entries whose names begin with a prefix, without the prefix."""
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
