"""TorchCommunicator: collectives over gloo for ranks of several hosts, or over NCCL for several GPUs."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.base.errors import UnsupportedError, WorkerError
from quire.base.logging import get_logger
from quire.parallel.communicator import (
    Transfer,
    check_exchange,
    check_gather,
    check_peer,
    check_scatter,
    check_tensor,
    sum_in_order,
)
from quire.parallel.peer_watch import PeerWatch

if TYPE_CHECKING:
    from torch.distributed import Backend, Store, Work

logger = get_logger(__name__)

ORDERED_BYTES = 1 << 20
"""Size of parts that are gathered to be summed in order, and up to which an all-reduce is always in order."""

_DEFAULT_TIMEOUT = timedelta(minutes=30)
_WARN_S = 5.0
_CLOSE_S = 2.0
_TICK_S = 0.1
_SPINS, _PAUSE_S = 200, 2e-5


class TorchCommunicator:
    """A Communicator over a process group of torch.distributed. Used by one thread of each rank at a time.

    On a GPU calls are launched on the current stream and return at once. On a CPU they return when they are done.

    group          with the methods of torch.distributed's process groups: allreduce, _allgather_base, alltoall_base, ...
    device_type    of the tensors: "cpu" or "cuda"
    watch          finds late or dead ranks; None: errors and warnings name none
    check          raises if another component knows that the group has ended, such as ProcessBarrier.check
    """

    def __init__(
        self,
        group: Backend,
        device_type: str,
        watch: PeerWatch | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self._group = group
        self._device_type = device_type
        self._watch = watch
        self._check = check
        self._waiter = _Waiter() if device_type == "cpu" else None
        self._timing = torch.cuda.Stream() if device_type == "cuda" else None  # notes when operations end

    @classmethod
    def gloo(
        cls,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta = _DEFAULT_TIMEOUT,
        interface: str | None = None,
        check: Callable[[], None] | None = None,
        hostname: str | None = None,
    ) -> TorchCommunicator:
        """Connect over gloo; every rank calls this.

        interface  of the network; hostname: alternatively an address of this host; None: GLOO_SOCKET_IFNAME or gloo's default
        """
        from torch.distributed import PrefixStore, ProcessGroupGloo

        options = ProcessGroupGloo._Options()
        options._timeout = timeout
        named = {} if interface is None else {"interface": interface}
        if hostname is not None and interface is None and "GLOO_SOCKET_IFNAME" not in os.environ:
            named = {"hostname": hostname}
        device = ProcessGroupGloo.create_device(**named) if named else ProcessGroupGloo.create_default_device()
        options._devices = [device]
        group = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)
        return cls(group, "cpu", PeerWatch(PrefixStore("watch", store), rank, size), check)

    @classmethod
    def nccl(
        cls, store: Store, rank: int, size: int, timeout: timedelta = _DEFAULT_TIMEOUT, check: Callable[[], None] | None = None
    ) -> TorchCommunicator:
        """Connect over NCCL, with the current CUDA device; every rank calls this."""
        from torch import distributed

        if not distributed.is_nccl_available():
            raise UnsupportedError("this build of torch has no NCCL; GPUs on several ranks need one with CUDA")
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return cls(
            distributed.ProcessGroupNCCL(distributed.PrefixStore("nccl", store), rank, size, options), "cuda", check=check
        )

    def close(self) -> None:
        """Stop the threads; the group must be idle."""
        if self._watch is not None:
            self._watch.close()
        if self._waiter is not None:
            self._waiter.close()

    def _finish(self, name: str, launch: Callable[[], Work | None], peer: int | None = None) -> None:
        """Launch an operation and wait for it; peer: the only other rank in it.

        Raises WorkerError if it failed, naming the failed rank if known.
        """
        work = self._launch(name, launch, peer)
        if work is not None:
            self._wait(name, work.wait if self._waiter is None else self._waited(name, self._waiter.take(work), peer))

    def _launch(self, name: str, launch: Callable[[], Work | None], peer: int | None = None) -> Work | None:
        if self._watch is not None and peer is None:
            self._watch.begin()
        try:
            return launch()
        except RuntimeError as error:
            raise self._failure(name, error) from error

    def _wait(self, name: str, wait: Callable[[], object]) -> None:
        try:
            wait()
        except RuntimeError as error:
            raise self._failure(name, error) from error

    def _waited(self, name: str, waiting: _Waiting, peer: int | None = None) -> Callable[[], None]:
        return lambda: waiting.wait(lambda waited_s: self._tick(name, waited_s, peer))

    def _tick(self, name: str, waited_s: float, peer: int | None) -> None:
        if self._check is not None:
            self._check()
        if self._watch is not None and waited_s % _WARN_S < _TICK_S and waited_s >= _WARN_S:
            late = self._watch.late_ranks() if peer is None else [peer]
            whom = ", ".join(f"rank {other}" for other in late) if late else "another rank"
            logger.warning("rank %d has waited for %s in %s for %.0f s", self.rank, whom, name, waited_s)

    def _failure(self, name: str, error: RuntimeError) -> WorkerError:
        if self._check is not None:
            try:
                self._check()
            except WorkerError as known:
                return known
        gone = self._watch.gone_ranks() if self._watch is not None else []
        if gone:
            named = " and ".join(f"rank {other}" for other in gone)
            return WorkerError(f"{named} is gone: {name} of rank {self.rank} failed ({error})", gone[0])
        return WorkerError(f"{name} of rank {self.rank} failed: {error}", self.rank)

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait for what was launched on the device before an event. Raises if the group has ended: then it may never come."""
        num_asked = 0
        while not event.query():
            num_asked += 1
            if num_asked > _SPINS:
                if self._check is not None:
                    self._check()
                time.sleep(_PAUSE_S)

    # Collectives

    def barrier(self) -> None:
        """See Communicator. On a GPU the stream waits, not the host."""
        self._finish("barrier", self._group.barrier)

    def all_gather(self, out: Tensor, part: Tensor, sizes: Sequence[int] | None = None) -> None:
        """See Communicator. Parts of different sizes are padded to the largest."""
        rows = check_gather(out, part, sizes, self.rank, self.size)
        self._check_tensors(out=out, part=part)
        most = max(rows)
        if most == 0:
            return
        if min(rows) == most:
            self._gather(as_sendable(out), as_sendable(part))
            return
        padded = as_sendable(part).new_empty((most, *as_sendable(part).shape[1:]))
        padded[: rows[self.rank]] = as_sendable(part)
        gathered = padded.new_empty((self.size, *padded.shape))
        self._gather(gathered, padded)
        torch.cat([gathered[other, :count] for other, count in enumerate(rows)], out=as_sendable(out))

    def _gather(self, out: Tensor, part: Tensor) -> None:
        if part.numel():
            self._finish("all_gather", lambda: self._group._allgather_base(out.view(-1), part.view(-1)))

    def all_reduce(self, x: Tensor, in_order: bool = True) -> None:
        """See Communicator. In order it is an all-gather and our own sum; else, above ORDERED_BYTES, the library's
        all-reduce."""
        self._check_tensors(x=x)
        if x.numel() == 0:
            return
        if not in_order and x.nbytes > ORDERED_BYTES:
            self._finish("all_reduce", lambda: self._group.allreduce([x]))
            return
        flat = x.view(-1)
        for piece in flat.split(max(1, ORDERED_BYTES // x.element_size())):
            gathered = piece.new_empty((self.size, piece.numel()))
            self._gather(as_sendable(gathered), as_sendable(piece))
            piece.copy_(sum_in_order(gathered.unbind(0)))

    def reduce_scatter(self, out: Tensor, x: Tensor, sizes: Sequence[int] | None = None) -> None:
        """See Communicator: an all-to-all and our own sum."""
        rows = check_scatter(out, x, sizes, self.rank, self.size)
        self._check_tensors(out=out, x=x)
        own = rows[self.rank]
        gathered = x.new_empty((self.size * own, *x.shape[1:]))
        self._exchange("reduce_scatter", gathered, x, [own] * self.size, rows)
        out.copy_(sum_in_order(gathered.view(self.size, *out.shape).unbind(0)))

    def all_to_all(self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> None:
        """See Communicator."""
        received, sent = check_exchange(out, x, out_sizes, sizes, self.rank, self.size)
        self._check_tensors(out=out, x=x)
        self._exchange("all_to_all", out, x, received, sent)

    def begin_all_to_all(self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> Transfer:
        """See Communicator. On a GPU it runs on the library's stream, after what was launched before."""
        received, sent = check_exchange(out, x, out_sizes, sizes, self.rank, self.size)
        self._check_tensors(out=out, x=x)
        given, taken = as_sendable(x), as_sendable(out)
        on_device = None if self._timing is None else _DeviceTransfer(self._timing, (given, taken))
        work = self._launch("all_to_all", lambda: self._group.alltoall_base(taken, given, received, sent))
        assert work is not None
        if on_device is not None:
            on_device.follow(work)
            return on_device
        assert self._waiter is not None
        waiting = self._waiter.take(work)
        wait = self._waited("all_to_all", waiting)
        return _HostTransfer(waiting, lambda: self._wait("all_to_all", wait), (given, taken))

    def _exchange(self, name: str, out: Tensor, x: Tensor, received: list[int], sent: list[int]) -> None:
        given, taken = as_sendable(x), as_sendable(out)
        self._finish(name, lambda: self._group.alltoall_base(taken, given, received, sent))

    def broadcast(self, x: Tensor, source: int) -> None:
        """See Communicator."""
        check_peer("source", source, self.rank, self.size, may_be_self=True)
        self._check_tensors(x=x)
        if x.numel():
            self._finish("broadcast", lambda: self._group.broadcast(as_sendable(x), source))

    def send(self, x: Tensor, to: int) -> None:
        """See Communicator."""
        check_peer("to", to, self.rank, self.size)
        self._check_tensors(x=x)
        if x.numel():
            self._finish("send", lambda: self._group.send([as_sendable(x)], to, 0), to)

    def recv(self, x: Tensor, source: int) -> None:
        """See Communicator."""
        check_peer("source", source, self.rank, self.size)
        self._check_tensors(x=x)
        if x.numel():
            self._finish("recv", lambda: self._group.recv([as_sendable(x)], source, 0), source)

    def _check_tensors(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            check_tensor(name, tensor, self._device_type)


def as_sendable(x: Tensor) -> Tensor:
    """Return a tensor; one-byte types are viewed as uint8, because the libraries lack float8, and copying needs no
    arithmetic."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


class _Waiting:
    """An operation that a _Waiter waits for; ended_s: when it was over."""

    def __init__(self, work: Work) -> None:
        self.work, self.began_s, self.ended_s = work, time.perf_counter(), 0.0
        self.is_done, self.error = threading.Event(), list[RuntimeError]()

    def wait(self, tick: Callable[[float], None]) -> None:
        """Wait for it; tick(seconds waited) is called ten times a second and may raise."""
        num_ticks = 0
        while not self.is_done.wait(_TICK_S):
            num_ticks += 1
            tick(num_ticks * _TICK_S)
        if self.error:
            raise self.error[0]


class _Waiter:
    """A thread that waits for operations, so that the caller can do checks meanwhile and be interrupted."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="quire-gloo-wait", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _run(self) -> None:
        while (item := self._works.get()) is not None:
            try:
                item.work.wait()
            except RuntimeError as error:
                item.error.append(error)
            item.ended_s = time.perf_counter()
            item.is_done.set()

    def take(self, work: Work) -> _Waiting:
        """Begin to wait for an operation, after those that were taken before."""
        waiting = _Waiting(work)
        self._works.put(waiting)
        return waiting

    def close(self) -> None:
        """Stop the thread after the current operation; within one, the interpreter could not end."""
        atexit.unregister(self.close)
        self._works.put(None)
        self._thread.join(_CLOSE_S)


class _HostTransfer:
    """Implements Transfer on a CPU; tensors: kept until it is over."""

    def __init__(self, waiting: _Waiting, wait: Callable[[], None], tensors: tuple[Tensor, ...]) -> None:
        self._waiting, self._wait, self._tensors = waiting, wait, tensors
        self._exposed_s = 0.0

    def wait(self) -> None:
        """See Transfer."""
        began_s = time.perf_counter()
        self._wait()
        self._exposed_s = time.perf_counter() - began_s
        self._tensors = ()

    def seconds(self) -> tuple[float, float]:
        """See Transfer."""
        return self._waiting.ended_s - self._waiting.began_s, self._exposed_s


class _DeviceTransfer:
    """Implements Transfer on a GPU, by events: when the current stream reached the operation, its end, and the wait for it.

    timing   a stream that does nothing else
    tensors  kept until the current stream waits, so that their memory is not used again
    """

    def __init__(self, timing: torch.cuda.Stream, tensors: tuple[Tensor, ...]) -> None:
        self._timing, self._tensors = timing, tensors
        self._began, self._ended, self._reached = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        self._began.record()

    def follow(self, work: Work) -> None:
        """Note the end of the operation, which was launched after this object was made."""
        with torch.cuda.stream(self._timing):
            work.wait()
            self._ended.record()

    def wait(self) -> None:
        """See Transfer."""
        self._reached.record()
        torch.cuda.current_stream().wait_event(self._ended)
        self._tensors = ()

    def seconds(self) -> tuple[float, float] | None:
        """See Transfer."""
        if not (self._ended.query() and self._reached.query()):
            return None
        exposed_ms = max(0.0, self._reached.elapsed_time(self._ended))
        return self._began.elapsed_time(self._ended) * 1e-3, exposed_ms * 1e-3
