"""ShmCommunicator: collectives over shared memory for ranks of one host, as processes or as threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.parallel.barrier import ProcessBarrier, native_extension
from quire.parallel.communicator import (
    EndedTransfer,
    check_exchange,
    check_gather,
    check_peer,
    check_scatter,
    check_tensor,
    exchange_at_once,
    row_bytes,
    sum_in_order,
)
from quire.parallel.shared_memory import SharedMemoryFile

SLOT_BYTES = 1 << 20
MAILBOX_BYTES = 64 << 10

_NATIVE_SUMS = {torch.float32: "f32", torch.bfloat16: "bf16"}


class ShmCommunicator:
    """A Communicator of CPU tensors. The barrier is the group's own; used by one thread of each rank at a time.

    Nothing is allocated after the start: tensors larger than a slot (SLOT_BYTES) are sent in pieces. A message of at most
    MAILBOX_BYTES is sent without waiting for its receiver.
    """

    def __init__(self, memory: SharedMemoryFile, barrier: ProcessBarrier, name: str = "collectives") -> None:
        """Attach to the areas of `areas()` with the same name and sizes."""
        self.rank = barrier.rank
        self.size = barrier.size
        self._barrier = barrier
        self._memory = memory
        native = native_extension()
        slot_bytes = memory.area(f"{name}.slots").size // (self.size + 1)
        mailbox_bytes = memory.area(f"{name}.mailboxes").size // self.size**2 - native.MAILBOX_BYTES
        self._native = native.NativeCollectives(
            barrier.address,
            barrier.rank,
            barrier.size,
            memory.address(f"{name}.slots"),
            slot_bytes,
            memory.address(f"{name}.mailboxes"),
            mailbox_bytes,
            barrier.warn_slow,
        )

    @staticmethod
    def areas(
        size: int, name: str = "collectives", slot_bytes: int = SLOT_BYTES, mailbox_bytes: int = MAILBOX_BYTES
    ) -> dict[str, int]:
        """Return the areas that a group of this size needs; pages that are never used take no memory."""
        mailbox = native_extension().MAILBOX_BYTES + mailbox_bytes
        return {f"{name}.slots": (size + 1) * slot_bytes, f"{name}.mailboxes": size * size * mailbox}

    def _run(self, call: Callable[..., bool], *arguments: object) -> None:
        if not call(*arguments):
            raise self._barrier.abort_error()

    def barrier(self) -> None:
        """See Communicator."""
        self._run(self._native.barrier)

    def all_gather(self, out: Tensor, part: Tensor, sizes: Sequence[int] | None = None) -> None:
        """See Communicator."""
        rows = check_gather(out, part, sizes, self.rank, self.size)
        _check(out=out, part=part)
        width = row_bytes(part)
        self._run(self._native.all_gather, out.data_ptr(), part.data_ptr(), [count * width for count in rows])

    def all_reduce(self, x: Tensor, in_order: bool = True) -> None:
        """See Communicator: always in order."""
        _check(x=x)
        name = _NATIVE_SUMS.get(x.dtype)
        if name is not None:
            self._run(self._native.all_reduce, x.data_ptr(), x.numel(), name)
        elif x.is_floating_point():
            widened = x.float()
            self._run(self._native.all_reduce, widened.data_ptr(), widened.numel(), "f32")
            x.copy_(widened)
        else:
            gathered = x.new_empty((self.size, *x.shape))
            self.all_gather(gathered, x.unsqueeze(0))
            x.copy_(sum_in_order(gathered.unbind(0)))

    def reduce_scatter(self, out: Tensor, x: Tensor, sizes: Sequence[int] | None = None) -> None:
        """See Communicator."""
        rows = check_scatter(out, x, sizes, self.rank, self.size)
        _check(out=out, x=x)
        name = _NATIVE_SUMS.get(x.dtype)
        if name is None and not x.is_floating_point():
            gathered = x.new_empty((self.size * rows[self.rank], *x.shape[1:]))
            self.all_to_all(gathered, x, [rows[self.rank]] * self.size, rows)
            out.copy_(sum_in_order(gathered.view(self.size, *out.shape).unbind(0)))
            return
        given, result = (x, out) if name is not None else (x.float(), torch.empty_like(out, dtype=torch.float32))
        width = row_bytes(given) // given.element_size()
        counts = [count * width for count in rows]
        self._run(self._native.reduce_scatter, result.data_ptr(), given.data_ptr(), counts, name or "f32")
        if result is not out:
            out.copy_(result)

    def all_to_all(self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> None:
        """See Communicator. Raises ValueError on every rank if sizes of two ranks do not agree."""
        received, sent = check_exchange(out, x, out_sizes, sizes, self.rank, self.size)
        _check(out=out, x=x)
        width = row_bytes(x)
        out_bytes, in_bytes = [count * width for count in received], [count * width for count in sent]
        self._run(self._native.all_to_all, out.data_ptr(), out_bytes, x.data_ptr(), in_bytes)

    def begin_all_to_all(self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> EndedTransfer:
        """See Communicator: it is over when this returns."""
        return exchange_at_once(self, out, x, out_sizes, sizes)

    def broadcast(self, x: Tensor, source: int) -> None:
        """See Communicator."""
        check_peer("source", source, self.rank, self.size, may_be_self=True)
        _check(x=x)
        self._run(self._native.broadcast, x.data_ptr(), x.nbytes, source)

    def send(self, x: Tensor, to: int) -> None:
        """See Communicator."""
        check_peer("to", to, self.rank, self.size)
        _check(x=x)
        self._run(self._native.send, x.data_ptr(), x.nbytes, to)

    def recv(self, x: Tensor, source: int) -> None:
        """See Communicator."""
        check_peer("source", source, self.rank, self.size)
        _check(x=x)
        self._run(self._native.recv, x.data_ptr(), x.nbytes, source)


def _check(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        check_tensor(name, tensor, "cpu")
