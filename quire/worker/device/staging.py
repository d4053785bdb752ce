"""Staging: all that the host tells the device about a step, in one copy; and Readback: what the device tells the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a step."""

    name: str
    dtype: torch.dtype
    count: int


@dataclass(frozen=True, slots=True)
class Staged:
    """The arrays of a step, by name: host [count], to be filled before they are sent, and device, what is sent there.

    end  offset in bytes behind them
    """

    host: Mapping[str, NDArray[np.generic]]
    device: Mapping[str, Tensor]
    end: int


class Staging:
    """A buffer on the host, pinned where the device is a GPU, and one of the same size on the device, at a fixed address."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        """Wait until what was sent has left the host's buffer, which may then be filled anew."""
        if self._event is not None:
            self._event.synchronize()

    def arrange(self, parts: Sequence[Part], start: int = 0) -> Staged:
        """Return arrays one behind the other from an offset on: the same places for the same parts."""
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
        self._device[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)
        if self._event is not None:
            self._event.record()


class Readback:
    """Brings the first numbers of a device tensor [N] i64 to the host."""

    def __init__(self, source: Tensor) -> None:
        is_cuda = source.device.type == "cuda"
        self._source = source
        self._host = torch.zeros(source.shape, dtype=source.dtype, pin_memory=is_cuda)
        self._event = torch.cuda.Event() if is_cuda else None

    def start(self, count: int) -> None:
        """Begin to copy, behind all that was launched so far."""
        self._host[:count].copy_(self._source[:count], non_blocking=True)
        if self._event is not None:
            self._event.record()

    def wait(self, count: int) -> NDArray[np.int64]:
        """Return what the last start copies, a view that the next one overwrites; waits for nothing launched after that."""
        if self._event is not None:
            self._event.synchronize()
        return self._host[:count].numpy()


def staged_bytes(parts: Sequence[Part]) -> int:
    """Return the most bytes that these parts take."""
    return sum(part.count * part.dtype.itemsize + _ALIGNMENT for part in parts)
