"""OffloadedWeights: weights of some layers in pinned host memory, copied to the device before their layer runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.model.device_linear import DeviceWeight
from quire.model.device_storages import bytes_of
from quire.model.offload_plan import NUM_BUFFERS, OffloadPlan

_ALIGNMENT = 256


class WeightCopies(Protocol):
    """Starts copies to a device, and orders them with what the device computes."""

    def begin(self) -> None:
        """Start the copies of a step: they wait for what was launched before."""
        ...

    def copy(self, pieces: list[tuple[Tensor, Tensor]], after: object | None) -> object:
        """Start to copy (host, device) pairs, after the work that `after` marks; return a mark of their end."""
        ...

    def wait(self, mark: object) -> None:
        """Make the launches that follow wait for a copy."""
        ...

    def mark(self) -> object:
        """Return a mark of the work that was launched so far."""
        ...


class HostCopies:
    """Implements WeightCopies where the host is the device: each copy has ended when `copy` returns."""

    def begin(self) -> None:
        """See WeightCopies."""

    def copy(self, pieces: list[tuple[Tensor, Tensor]], after: object | None) -> object:
        """See WeightCopies."""
        for source, target in pieces:
            target.copy_(source)
        return None

    def wait(self, mark: object) -> None:
        """See WeightCopies."""

    def mark(self) -> object:
        """See WeightCopies."""
        return None


class CudaCopies:
    """Implements WeightCopies with a side stream of a CUDA device; marks are CUDA events."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def begin(self) -> None:
        """See WeightCopies."""
        self._stream.wait_stream(torch.cuda.current_stream())

    def copy(self, pieces: list[tuple[Tensor, Tensor]], after: object | None) -> object:
        """See WeightCopies."""
        if isinstance(after, torch.cuda.Event):
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            for source, target in pieces:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, mark: object) -> None:
        """See WeightCopies."""
        assert isinstance(mark, torch.cuda.Event)
        torch.cuda.current_stream().wait_event(mark)

    def mark(self) -> object:
        """See WeightCopies."""
        return torch.cuda.current_stream().record_event()


class _Piece(NamedTuple):
    """One storage in host memory, and the tensors that view it: (tensor, its first byte in the storage, size, stride)."""

    host: Tensor
    views: list[tuple[Tensor, int, tuple[int, ...], tuple[int, ...]]]


class OffloadedWeights:
    """The weights of the layers of a plan. Loading calls `take` for each weight and then `finish`; a step calls `begin`, and
    `before` and `after` around each layer.

    The tensors of a layer view a staging buffer, always the same one, so that their addresses never change. They have the
    layer's values between `before` and `after` only.
    """

    def __init__(self, device: torch.device, plan: OffloadPlan) -> None:
        self.device, self.plan = device, plan
        self._pieces: dict[int, list[_Piece]] = {layer: [] for layer in plan.layers}
        self._copies: WeightCopies = CudaCopies(device) if device.type == "cuda" else HostCopies()
        self._places = {layer: place for place, layer in enumerate(plan.layers)}
        self._moves: list[list[tuple[Tensor, Tensor]]] = []
        self._marks: list[object] = [None] * NUM_BUFFERS
        self.num_bytes = 0

    def take(self, name: str, weights: Sequence[DeviceWeight]) -> None:
        """Move a complete weight, in parts, to the host if its layer is in the plan; its memory on the device is freed."""
        parts = name.split(".")
        pieces = self._pieces.get(int(parts[1])) if parts[0] == "layers" else None
        if pieces is None:
            return
        found: dict[int, _Piece] = {}
        storages: list[torch.UntypedStorage] = []
        for tensor in (tensor for weight in weights for tensor in _own_tensors(weight)):
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            if key not in found:
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
                host.copy_(bytes_of(storage))
                found[key] = _Piece(host, [])
                storages.append(storage)
            first = tensor.storage_offset() * tensor.itemsize
            found[key].views.append((tensor, first, tuple(tensor.shape), tensor.stride()))
        for storage in storages:
            if storage.resizable():  # a view of a file is not, where the host is the device
                storage.resize_(0)
        pieces.extend(found.values())
        self.num_bytes += sum(piece.host.numel() for piece in found.values())

    def finish(self) -> None:
        """Make the staging buffers, and let the tensors of all layers view them."""
        sizes = [sum(_padded(piece.host.numel()) for piece in self._pieces[layer]) for layer in self.plan.layers]
        num_buffers = min(NUM_BUFFERS, len(sizes))
        buffers = [torch.empty(max(sizes), dtype=torch.uint8, device=self.device) for _ in range(num_buffers)]
        for place, layer in enumerate(self.plan.layers):
            buffer, start = buffers[place % num_buffers], 0
            moves: list[tuple[Tensor, Tensor]] = []
            for host, views in self._pieces[layer]:
                moves.append((host, buffer[start : start + host.numel()]))
                for tensor, first, shape, stride in views:
                    tensor.set_(buffer.untyped_storage(), (start + first) // tensor.itemsize, shape, stride)
                start += _padded(host.numel())
            self._moves.append(moves)
        self._pieces.clear()

    def begin(self) -> None:
        """Start to copy the first layers, before a step's first launch."""
        self._copies.begin()
        for place in range(min(NUM_BUFFERS, len(self._moves))):
            self._marks[place] = self._copies.copy(self._moves[place], None)

    def before(self, layer: int) -> None:
        """Make the launches that follow wait for the weights of a layer."""
        place = self._places.get(layer)
        if place is not None:
            self._copies.wait(self._marks[place % NUM_BUFFERS])

    def after(self, layer: int) -> None:
        """Start to copy the next layer to the staging buffer that a layer has used, once the launches so far have ended."""
        place = self._places.get(layer)
        if place is not None and place + NUM_BUFFERS < len(self._moves):
            mark = self._copies.mark()
            self._marks[place % NUM_BUFFERS] = self._copies.copy(self._moves[place + NUM_BUFFERS], mark)


def _own_tensors(weight: DeviceWeight) -> Iterator[Tensor]:
    """Yield the large tensors of a weight; an order of columns may belong to several layers."""
    if isinstance(weight, Tensor):
        yield weight
        return
    yield from (part for part in (weight.codes, weight.scales, weight.offsets) if part is not None)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
