"""DeviceCopies: copies host tensors to a device through a few buffers, so that reading and copying overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

_NUM_BUFFERS = 4
_BUFFER_BYTES = 16 << 20
"""A sixtieth of a second of reading a file that is in memory: copies of less would be bound by what starting one takes."""


class SentBuffer(Protocol):
    """A host buffer from which the device copies asynchronously."""

    bytes: Tensor
    """[N] u8"""

    def send(self, source: Tensor, out: Tensor) -> None:
        """Start to copy a view of the buffer to a tensor on the device, which may have another dtype."""
        ...

    def wait(self) -> None:
        """Wait until the last copy has ended."""
        ...


class PinnedBuffer:
    """A pinned buffer for a CUDA device; copies run in its stream."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._event = torch.cuda.Event()

    def send(self, source: Tensor, out: Tensor) -> None:
        """See SentBuffer."""
        out.copy_(source, non_blocking=True)
        self._event.record()

    def wait(self) -> None:
        """See SentBuffer."""
        self._event.synchronize()


class DeviceCopies:
    """Copies tensors to a device; a source may be freed or changed as soon as the call has returned.

    make_buffer  makes a buffer of a number of bytes; None: torch copies directly, as when the device is the host
    """

    def __init__(
        self,
        device: torch.device,
        make_buffer: Callable[[int], SentBuffer] | None,
        buffer_bytes: int = _BUFFER_BYTES,
    ) -> None:
        self._device = device
        self._buffer_bytes = buffer_bytes
        self._buffers = [] if make_buffer is None else [make_buffer(buffer_bytes) for _ in range(_NUM_BUFFERS)]
        self._num_sent = 0

    @classmethod
    def to(cls, device: torch.device) -> DeviceCopies:
        """Return a DeviceCopies for a device, with pinned buffers if it is a GPU."""
        return cls(device, PinnedBuffer if device.type == "cuda" else None)

    def upload(self, source: Tensor) -> Tensor:
        """Return a tensor on the device; itself if it is there already."""
        if not self._buffers or source.device.type != "cpu":
            return source.to(self._device)
        out = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        self.fill(out, source)
        return out

    def fill(self, out: Tensor, source: Tensor) -> None:
        """Fill a tensor on the device with one of the same shape, rounded to its dtype."""
        row_bytes = source[:1].numel() * source.itemsize if source.ndim else 0
        if not self._buffers or source.device.type != "cpu" or not 0 < row_bytes <= self._buffer_bytes:
            out.copy_(source)
            return
        step = self._buffer_bytes // row_bytes
        for first in range(0, len(source), step):
            rows = source[first : first + step]
            buffer = self._buffers[self._num_sent % _NUM_BUFFERS]
            self._num_sent += 1
            buffer.wait()
            staged = buffer.bytes[: rows.numel() * rows.itemsize].view(rows.dtype).view(rows.shape)
            staged.copy_(rows)
            buffer.send(staged, out[first : first + step])

    def finish(self) -> None:
        """Wait until all copies have ended."""
        for buffer in self._buffers:
            buffer.wait()
