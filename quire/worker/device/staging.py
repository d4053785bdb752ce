"""Staging: all inputs of a step, in one copy to the device; Readback: results of steps, in copies to the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvariantError

_ALIGNMENT = 16
"""Bytes; kernels read aligned tensors in wider pieces."""

_NUMPY = {
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}


def numpy_type(dtype: torch.dtype) -> np.dtype[np.generic]:
    """Return the type of an array on the host."""
    return _NUMPY[dtype]


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a step."""

    name: str
    dtype: torch.dtype
    count: int


@dataclass(frozen=True, slots=True)
class Staged:
    """The arrays of a step, by name: host [count], to be filled before they are sent, and device, what is sent there.

    end  offset in bytes after the last one
    """

    host: Mapping[str, NDArray[np.generic]]
    device: Mapping[str, Tensor]
    end: int


class Staging:
    """A buffer on the host, pinned where the device is a GPU, and one of the same size on the device, at a fixed address.

    holds      key of the contents of the host's buffer, set by the code that fills it; None: nothing that is used again
    wait       waits for an event; None: torch does
    num_steps  that may be sent before the device takes the first, as where it waits for another stage: each is then copied to
               one of so many pinned buffers first
    """

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        wait: Callable[[torch.cuda.Event], None] | None = None,
        num_steps: int = 1,
    ) -> None:
        self.holds: Hashable = None
        self._wait = wait or torch.cuda.Event.synchronize
        is_cuda, num_copies = device.type == "cuda", num_steps if num_steps > 1 else 0
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda and num_copies == 0)
        self._copies = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(num_copies)]
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._events = [torch.cuda.Event() for _ in range(max(1, num_copies))] if is_cuda else []
        self._num_sent = 0

    def wait(self) -> None:
        """Wait until what was sent has left the host's buffer, which may then be filled anew."""
        if self._events and not self._copies:
            self._wait(self._events[0])

    @property
    def host_bytes(self) -> NDArray[np.uint8]:
        """The host's buffer."""
        return self._host.numpy()

    def arrange(self, parts: Sequence[Part], start: int = 0) -> Staged:
        """Return arrays one after the other from an offset on: the same places for the same parts."""
        host: dict[str, NDArray[np.generic]] = {}
        device: dict[str, Tensor] = {}
        for part in parts:
            start = -(-start // _ALIGNMENT) * _ALIGNMENT
            end = start + part.count * part.dtype.itemsize
            if end > len(self._host):
                raise InvariantError(f"a step takes {end} bytes or more, its staging buffer has {len(self._host)}")
            host[part.name] = self._host.numpy()[start:end].view(_NUMPY[part.dtype])
            device[part.name] = self._device[start:end].view(part.dtype)
            start = end
        return Staged(host, device, start)

    def send(self, num_bytes: int) -> None:
        """Copy the first bytes to the device, in the order of its stream; the host's must stay as they are until `wait`."""
        place, source = 0, self._host
        if self._copies:
            place = self._num_sent % len(self._copies)
            self._num_sent += 1
            if self._events:
                self._wait(self._events[place])
            source = self._copies[place]
            source[:num_bytes].copy_(self._host[:num_bytes])
        self._device[:num_bytes].copy_(source[:num_bytes], non_blocking=True)
        if self._events:
            self._events[place].record()


NUM_READBACKS = 2
"""Steps that may be on their way at a time."""


class Readback:
    """Brings the first numbers of a device tensor [N] i64 to the host, after each step: a ring of num_buffers buffers.

    wait  waits for an event; None: torch does
    """

    def __init__(
        self,
        source: Tensor,
        wait: Callable[[torch.cuda.Event], None] | None = None,
        num_buffers: int = NUM_READBACKS,
    ) -> None:
        self._wait = wait or torch.cuda.Event.synchronize
        is_cuda = source.device.type == "cuda"
        self._source = source
        self._hosts = [torch.zeros(source.shape, dtype=source.dtype, pin_memory=is_cuda) for _ in range(num_buffers)]
        self._events = [torch.cuda.Event() for _ in range(num_buffers)] if is_cuda else []
        self._num_started = 0

    def start(self, count: int) -> int:
        """Begin to copy, after all that was launched so far, to the place that is returned, which is overwritten.

        A device without memory has nothing to copy.
        """
        place = self._num_started % len(self._hosts)
        self._num_started += 1
        if count and not self._source.is_meta:
            self._hosts[place][:count].copy_(self._source[:count], non_blocking=True)
        if self._events:
            self._events[place].record()
        return place

    def wait(self, place: int, count: int) -> NDArray[np.int64]:
        """Return what `start` copied to a place, a view; waits for what was launched before that alone."""
        if self._events:
            self._wait(self._events[place])
        return self._hosts[place][:count].numpy()


def staged_bytes(parts: Sequence[Part]) -> int:
    """Return the most bytes that these parts take."""
    return sum(part.count * part.dtype.itemsize + _ALIGNMENT for part in parts)


def waits_by(method: weakref.WeakMethod[Callable[[torch.cuda.Event], None]]) -> Callable[[torch.cuda.Event], None]:
    """Return a function that waits for an event by a method, without keeping its object alive."""

    def wait(event: torch.cuda.Event) -> None:
        bound = method()
        if bound is None:
            event.synchronize()
        else:
            bound(event)

    return wait
