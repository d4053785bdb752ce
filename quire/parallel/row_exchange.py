"""RowExchange: replaces a barrier of a native step if ranks do not share memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from quire.base.errors import WorkerError
from quire.base.logging import get_logger
from quire.parallel.barrier import AbortReason, ProcessBarrier
from quire.parallel.communicator import Communicator

logger = get_logger(__name__)

WrittenBlock = tuple[int, int, int, int]
"""(offset, count, stride, bytes): `count` times `bytes` bytes, `stride` bytes apart, `offset` after the base of the rows."""


class RowExchange:
    """Gathers what all ranks have written to their rows since the last barrier, and writes it to the same places here.

    The rows have the same layout on all ranks, so a rank need not know another one's shard: places are sent with values.
    Nothing is summed, so the rows have the same bits as with shared memory.
    """

    def __init__(self, communicator: Communicator, barrier: ProcessBarrier) -> None:
        """barrier: of this rank; it gets the reason if an exchange fails."""
        self._communicator = communicator
        self._barrier = barrier

    def __call__(self, base: int, written: Sequence[WrittenBlock]) -> bool:
        """Called by the native step; False if the group has ended. Never raises, as it is called from native threads."""
        try:
            self._barrier.check()
            self._exchange(base, written)
        except WorkerError as error:
            self._barrier.abort(error.rank, AbortReason.FAILED, str(error))
            return False
        except Exception as error:
            logger.exception("an exchange of rows failed")
            self._barrier.abort(self._barrier.rank, AbortReason.FAILED, f"{type(error).__name__}: {error}")
            return False
        return True

    def _exchange(self, base: int, written: Sequence[WrittenBlock]) -> None:
        parts = [np.array(written, np.int64).reshape(-1, 4).view(np.uint8).reshape(-1)]
        parts += [np.ascontiguousarray(_view(base, block)).reshape(-1) for block in written]
        own = np.concatenate(parts)
        size, rank = self._communicator.size, self._communicator.rank
        sizes = torch.empty((size, 2), dtype=torch.int64)
        self._communicator.all_gather(sizes, torch.tensor([[len(written), own.size]]))
        counts, lengths = sizes[:, 0].tolist(), sizes[:, 1].tolist()
        gathered = torch.empty(sum(lengths), dtype=torch.uint8)
        self._communicator.all_gather(gathered, torch.from_numpy(own), lengths)
        whole, at = gathered.numpy(), 0
        for other, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            if other != rank:
                _place(base, whole[at : at + length], count)
            at += length


def _place(base: int, received: NDArray[np.uint8], count: int) -> None:
    """Write another rank's blocks to their places."""
    table = received[: count * 32].copy().view(np.int64).reshape(count, 4).tolist()
    at = count * 32
    for block in table:
        view = _view(base, tuple(block))
        view[:] = received[at : at + view.size].reshape(view.shape)
        at += view.size


def _view(base: int, block: WrittenBlock) -> NDArray[np.uint8]:
    offset, count, stride, num_bytes = block
    extent = (count - 1) * stride + num_bytes
    memory = np.frombuffer((ctypes.c_uint8 * extent).from_address(base + offset), np.uint8)
    return as_strided(memory, (count, num_bytes), (stride, 1))
