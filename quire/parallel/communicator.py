"""Communicator: the collectives of a group of ranks, and a wrapper that counts calls."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.rank_stats import CollectiveStats


class Transfer(Protocol):
    """A collective that has begun. Until wait returns its tensors may be neither read nor changed."""

    def wait(self) -> None:
        """Return when what it received may be read; on a GPU by what is launched on the current stream from then on.

        Raises WorkerError if the group has ended.
        """
        ...

    def seconds(self) -> tuple[float, float] | None:
        """Return, after wait, how long the operation took, and how much of that the caller, or its GPU, waited for it.

        None: the GPU is not that far yet.
        """
        ...


@dataclass(frozen=True, slots=True)
class EndedTransfer:
    """Implements Transfer for an operation that was over when it returned; duration_s: all of which the caller waited."""

    duration_s: float

    def wait(self) -> None:
        """Return at once."""

    def seconds(self) -> tuple[float, float]:
        """See Transfer."""
        return self.duration_s, self.duration_s


class Communicator(Protocol):
    """The collectives of a group. Every rank makes the same calls in the same order, with tensors of the same dtype.

    Tensors are contiguous and on the group's device. Sizes are numbers of rows (of the first dimension), one for each rank,
    and may differ and be 0; None: the same for all. Every call raises WorkerError if the group has ended.
    """

    rank: int
    size: int

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        ...

    def all_gather(self, out: Tensor, part: Tensor, sizes: Sequence[int] | None = None) -> None:
        """Write the parts of all ranks into `out`, concatenated along the first dimension."""
        ...

    def all_reduce(self, x: Tensor, in_order: bool = True) -> None:
        """Replace x by the sum of the ranks' x.

        Floats are added in f32 in the order of ranks and rounded once: the same bits on every rank, whatever the size.
        in_order=False: large tensors may be added in any order, if that is faster.
        """
        ...

    def reduce_scatter(self, out: Tensor, x: Tensor, sizes: Sequence[int] | None = None) -> None:
        """Write into `out` this rank's rows of the sum of the ranks' x, added as in all_reduce."""
        ...

    def all_to_all(self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> None:
        """Send to each rank its rows of x (sizes), and write the received rows into `out` (out_sizes), in rank order."""
        ...

    def begin_all_to_all(self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> Transfer:
        """Begin an all_to_all, next to which the caller may compute and begin others; all ranks in one order."""
        ...

    def broadcast(self, x: Tensor, source: int) -> None:
        """Replace x by that of rank `source`."""
        ...

    def send(self, x: Tensor, to: int) -> None:
        """Send x to one other rank, which calls recv with a tensor of the same shape. The others do not participate."""
        ...

    def recv(self, x: Tensor, source: int) -> None:
        """Replace x by what rank `source` has sent."""
        ...


def check_tensor(name: str, x: Tensor, device_type: str | None = None) -> None:
    """Raise InvariantError for a tensor that a collective does not accept."""
    if not x.is_contiguous():
        raise InvariantError(f"{name} of a collective must be contiguous, got strides {x.stride()} of shape {tuple(x.shape)}")
    if device_type is not None and x.device.type != device_type:
        raise InvariantError(f"{name} of a collective must be on a device of type {device_type}, got {x.device}")


def check_peer(name: str, peer: int, rank: int, size: int, may_be_self: bool = False) -> None:
    """Raise InvariantError for a rank that is not in the group, or that is this rank unless may_be_self."""
    if not 0 <= peer < size or (peer == rank and not may_be_self):
        raise InvariantError(
            f"{name} must be {'a' if may_be_self else 'another'} rank from 0 to {size - 1}, got {peer} on rank {rank}"
        )


def sizes_of(sizes: Sequence[int] | None, own_rows: int, num_ranks: int) -> list[int]:
    """Return the rows of each rank. Raises InvariantError if there is not one size per rank."""
    if sizes is None:
        return [own_rows] * num_ranks
    if len(sizes) != num_ranks or any(size < 0 for size in sizes):
        raise InvariantError(f"sizes must be a number >= 0 for each of {num_ranks} ranks, got {list(sizes)}")
    return list(sizes)


def check_rows(name: str, x: Tensor, rows: int, like: Tensor) -> None:
    """Raise InvariantError unless x has this number of rows, of the shape and dtype of another tensor's."""
    if x.dim() < 1 or x.shape[0] != rows or x.shape[1:] != like.shape[1:] or x.dtype != like.dtype:
        wanted = (rows, *like.shape[1:])
        raise InvariantError(f"{name} must be {like.dtype} of shape {wanted}, got {x.dtype} of shape {tuple(x.shape)}")


def check_gather(out: Tensor, part: Tensor, sizes: Sequence[int] | None, rank: int, size: int) -> list[int]:
    """Return the rows of each rank of an all_gather. Raises InvariantError if shapes do not match."""
    rows = sizes_of(sizes, part.shape[0] if part.dim() else 0, size)
    check_rows("part", part, rows[rank], part)
    check_rows("out", out, sum(rows), part)
    return rows


def check_scatter(out: Tensor, x: Tensor, sizes: Sequence[int] | None, rank: int, size: int) -> list[int]:
    """Return the rows of each rank of a reduce_scatter. Raises InvariantError if shapes do not match."""
    rows = sizes_of(sizes, out.shape[0] if out.dim() else 0, size)
    check_rows("out", out, rows[rank], out)
    check_rows("x", x, sum(rows), out)
    return rows


def check_exchange(
    out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int], rank: int, size: int
) -> tuple[list[int], list[int]]:
    """Return the rows received and sent of an all_to_all. Raises InvariantError if shapes do not match."""
    received, sent = sizes_of(out_sizes, 0, size), sizes_of(sizes, 0, size)
    check_rows("x", x, sum(sent), x)
    check_rows("out", out, sum(received), x)
    if received[rank] != sent[rank]:
        raise InvariantError(f"rank {rank} sends {sent[rank]} rows to itself and expects {received[rank]}")
    return received, sent


def row_bytes(x: Tensor) -> int:
    """Return the bytes of a row of the first dimension."""
    return x[0].numel() * x.element_size() if x.shape[0] else x.new_empty(x.shape[1:]).numel() * x.element_size()


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one dtype: floats in f32 from the left, rounded once to their dtype; integers exactly."""
    if not parts[0].is_floating_point():
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part.float()
    return total.to(parts[0].dtype)


def least_of(communicator: Communicator, value: int) -> int:
    """Return the minimum of the values of all ranks of a group on the host."""
    values = torch.empty(communicator.size, dtype=torch.int64)
    communicator.all_gather(values, torch.tensor([value]))
    return int(values.min())


def all_agree(communicator: Communicator, says_yes: bool) -> bool:
    """Return whether all ranks of a group on the host say yes."""
    return least_of(communicator, int(says_yes)) == 1


def exchange_at_once(
    communicator: Communicator, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
) -> EndedTransfer:
    """Do what begin_all_to_all begins, for a communicator that does nothing next to its caller."""
    began_s = time.perf_counter()
    communicator.all_to_all(out, x, out_sizes, sizes)
    return EndedTransfer(time.perf_counter() - began_s)


@dataclass(slots=True)
class OperationCount:
    """Statistics of one operation.

    num_bytes  of the tensors that this rank passed
    seconds    of the calls, as measured on the host: on a GPU the time to launch them one by one. Of operations that the
               caller begins and waits for later, on a GPU as well, from the beginning to the end
    exposed_seconds  of these, those in which the caller, or its GPU, did nothing but wait
    """

    num_calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0


class CountingCommunicator:
    """Forwards calls to another communicator and counts them by operation; `counts` may be read at any time."""

    def __init__(self, inner: Communicator, clock: Callable[[], float] = time.perf_counter) -> None:
        self._inner = inner
        self._clock = clock
        self.rank = inner.rank
        self.size = inner.size
        self.counts: dict[str, OperationCount] = {}
        self._counted = self.counts  # where calls are counted; a graph has its own
        self._transfers: deque[tuple[str, Transfer]] = deque()  # that were waited for, and whose times are not known yet

    def stats(self) -> dict[str, CollectiveStats]:
        """Return a copy of the counts."""
        self._note_times()
        return {
            name: CollectiveStats(
                num_calls=count.num_calls,
                num_bytes=count.num_bytes,
                seconds=count.seconds,
                exposed_seconds=count.exposed_seconds,
            )
            for name, count in tuple(self.counts.items())
        }

    def _note_times(self) -> None:
        """Add the times of operations that have ended."""
        while self._transfers and (times := self._transfers[0][1].seconds()) is not None:
            count = self.counts.setdefault(self._transfers.popleft()[0], OperationCount())
            count.seconds += times[0]
            count.exposed_seconds += times[1]

    def close(self) -> None:
        """Close the other communicator, where it has something to close; no collective may be running."""
        close = getattr(self._inner, "close", None)
        if close is not None:
            close()

    def captured(
        self, capture: Callable[[Callable[[], None]], Callable[[], None]], step: Callable[[], None]
    ) -> Callable[[], None]:
        """Capture a step with `capture`, and return what launches it again and counts its collectives each time.

        Capturing runs nothing, so it counts nothing. Launching a graph takes the host no time per collective: `seconds`
        do not rise.
        """
        added: dict[str, OperationCount] = {}

        def counted_step() -> None:
            added.clear()  # a step may be captured again where memory ended
            self._counted = added
            try:
                step()
            finally:
                self._counted = self.counts

        replay = capture(counted_step)

        def counted_replay() -> None:
            replay()
            for name, one in added.items():
                count = self.counts.setdefault(name, OperationCount())
                count.num_calls += one.num_calls
                count.num_bytes += one.num_bytes

        return counted_replay

    def _count(self, name: str, num_bytes: int, call: Callable[[], None]) -> None:
        began_s = self._clock()
        call()
        count = self._counted.setdefault(name, OperationCount())
        count.num_calls += 1
        count.num_bytes += num_bytes
        duration_s = self._clock() - began_s
        count.seconds += duration_s
        count.exposed_seconds += duration_s

    def barrier(self) -> None:
        """See Communicator."""
        self._count("barrier", 0, self._inner.barrier)

    def all_gather(self, out: Tensor, part: Tensor, sizes: Sequence[int] | None = None) -> None:
        """See Communicator."""
        self._count("all_gather", part.nbytes, lambda: self._inner.all_gather(out, part, sizes))

    def all_reduce(self, x: Tensor, in_order: bool = True) -> None:
        """See Communicator."""
        self._count("all_reduce", x.nbytes, lambda: self._inner.all_reduce(x, in_order))

    def reduce_scatter(self, out: Tensor, x: Tensor, sizes: Sequence[int] | None = None) -> None:
        """See Communicator."""
        self._count("reduce_scatter", x.nbytes, lambda: self._inner.reduce_scatter(out, x, sizes))

    def all_to_all(self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> None:
        """See Communicator."""
        self._count("all_to_all", x.nbytes, lambda: self._inner.all_to_all(out, x, out_sizes, sizes))

    def begin_all_to_all(self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> Transfer:
        """See Communicator."""
        self._note_times()
        transfer = self._inner.begin_all_to_all(out, x, out_sizes, sizes)
        count = self.counts.setdefault("all_to_all", OperationCount())
        count.num_calls += 1
        count.num_bytes += x.nbytes
        return _CountedTransfer(transfer, lambda: self._transfers.append(("all_to_all", transfer)))

    def wait_for(self, event: torch.cuda.Event) -> None:
        """See TorchCommunicator; only of one on a GPU."""
        wait: Callable[[torch.cuda.Event], None] = getattr(self._inner, "wait_for", torch.cuda.Event.synchronize)
        wait(event)

    def broadcast(self, x: Tensor, source: int) -> None:
        """See Communicator."""
        self._count("broadcast", x.nbytes if source == self.rank else 0, lambda: self._inner.broadcast(x, source))

    def send(self, x: Tensor, to: int) -> None:
        """See Communicator."""
        self._count("send", x.nbytes, lambda: self._inner.send(x, to))

    def recv(self, x: Tensor, source: int) -> None:
        """See Communicator."""
        self._count("recv", 0, lambda: self._inner.recv(x, source))


@dataclass(frozen=True, slots=True)
class _CountedTransfer:
    """note: called when the operation was waited for."""

    inner: Transfer
    note: Callable[[], None]

    def wait(self) -> None:
        self.inner.wait()
        self.note()

    def seconds(self) -> tuple[float, float] | None:
        return self.inner.seconds()
