"""WorkerGroup: the leader's handle of the workers of a group on one host, until they end."""

from __future__ import annotations

import dataclasses
import os
import secrets
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from quire.base import errors
from quire.base.errors import ConfigError, QuireError, WorkerError
from quire.base.logging import get_logger
from quire.base.threads import num_usable_cores
from quire.contracts.parallel import MAX_RANKS
from quire.contracts.rank_stats import RankStats
from quire.parallel.barrier import AbortReason, ProcessBarrier, RankCounts
from quire.parallel.process_monitor import WATCHDOG_TIMEOUT_S, ProcessMonitor
from quire.parallel.ring import RingWriter, ring_areas
from quire.parallel.row_exchange import RowExchange
from quire.parallel.shared_memory import SharedMemoryFile
from quire.parallel.shm_communicator import ShmCommunicator
from quire.parallel.startup import Board, StartupBoard, StartupReporter, StartupStatus

logger = get_logger(__name__)

_POLL_S = 0.01
_LATE_S = 20.0
"""Interval at which ranks that are not ready are logged with their stage."""

_LEAVE_S = 0.5
"""Time that the ranks of an aborted group have to leave their step before they are killed."""

_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """How workers are started.

    start_timeout_s     until all are ready; all are killed after it
    watchdog_timeout_s  see ProcessMonitor
    areas               additional areas of the shared memory, by name, in bytes
    subgroups           ranks that have a barrier of their own, by its name
    with_store          create a store of torch.distributed on this host, for gloo or NCCL, with a port that is bound before
                        workers learn it
    log_level           of the workers
    pass_fds            additional descriptors that every worker inherits, under the same numbers
    """

    start_timeout_s: float = 600.0
    watchdog_timeout_s: float = WATCHDOG_TIMEOUT_S
    areas: Mapping[str, int] = field(default_factory=dict)
    subgroups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    with_store: bool = False
    log_level: str = "INFO"
    pass_fds: tuple[int, ...] = ()


class WorkerProcess(Protocol):
    """A worker's process, with the interface of subprocess.Popen."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class JoinedProcess:
    """A worker's process that a launcher has started. Its status is not known: wait returns 0."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._descriptor = -1  # it has ended

    @property
    def pid(self) -> int:
        return self._pid

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        if self._descriptor >= 0:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"pid {self._pid}", timeout or 0.0)
            os.close(self._descriptor)
            self._descriptor = -1
        return 0

    def kill(self) -> None:
        """Kill it by its pidfd, so never another process with the same number."""
        if self._descriptor >= 0:
            try:
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            except ProcessLookupError:
                logger.debug("the worker with pid %d has ended", self._pid)


class StartingWorkers:
    """Startup handling that all kinds of groups share.

    memory, barrier  of the group; only the leader's own if ranks share no memory
    exchange         exchanges rows between ranks that share no memory
    num_on_host      ranks on the leader's host, if there are several hosts; address: of that host
    on_end           called once when everything has been released
    """

    exchange: RowExchange | None = None
    num_on_host: int | None = None
    address: str | None = None
    on_end: Callable[[], None] | None = None

    def __init__(
        self, size: int, options: LaunchOptions, board: Board, memory: SharedMemoryFile, barrier: ProcessBarrier
    ) -> None:
        self.size = size
        self.memory, self.barrier = memory, barrier
        self.board = board
        self.startup = StartupReporter(board, 0)
        self._options = options
        self._began_s = time.monotonic()
        self._is_closed = False

    def kill(self) -> None:
        """Kill the remaining workers and release everything."""
        raise NotImplementedError

    def _on_ready(self) -> None:
        """Called once, when all ranks are ready."""
        raise NotImplementedError

    def _call_on_end(self) -> None:
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()

    def wait_ready(self) -> list[StartupStatus]:
        """Wait until all workers are ready; return the status of each rank, the leader included.

        Raises the error of a failed worker, in its class if it is one of quire's; or WorkerError, also after start_timeout_s.
        All workers are killed then.
        """
        end_s, report_s = self._began_s + self._options.start_timeout_s, self._began_s + _LATE_S
        try:
            while True:
                statuses = [self.board.read(rank) for rank in range(self.size)]
                self.raise_failure()
                if all(status.state == "ready" for status in statuses[1:]):
                    self._on_ready()
                    return statuses
                self.barrier.check()
                now_s = time.monotonic()
                if now_s >= end_s:
                    raise WorkerError(
                        f"start_timeout_s ({self._options.start_timeout_s:g} s) is over and not all ranks are ready: "
                        f"{self._describe(statuses, now_s)}",
                        next(rank for rank in range(1, self.size) if statuses[rank].state != "ready"),
                    )
                if now_s >= report_s:
                    report_s += _LATE_S
                    logger.info("waiting for ranks: %s", self._describe(statuses, now_s))
                time.sleep(_POLL_S)
        except BaseException:
            self.kill()
            raise

    def _describe(self, statuses: list[StartupStatus], now_s: float) -> str:
        parts: list[str] = []
        for rank in range(1, self.size):
            status = statuses[rank]
            if status.since_s == 0.0:
                status = dataclasses.replace(status, since_s=self._began_s)
            parts.append(f"rank {rank}: {status.describe(now_s)}")
        return "; ".join(parts)

    def raise_failure(self) -> None:
        """Raise the error of a failed worker, if there is one; see wait_ready."""
        for rank in range(1, self.size):
            self._raise_failure(rank, self.board.read(rank))

    def _raise_failure(self, rank: int, status: StartupStatus) -> None:
        if status.state != "failed" or status.error is None:
            return
        name, text = status.error
        kind = getattr(errors, name, None)
        told = f"rank {rank} failed in {status.stage}: {text}"
        if isinstance(kind, type) and issubclass(kind, QuireError) and not issubclass(kind, WorkerError):
            raise kind(told)
        raise WorkerError(told if kind is not None else f"rank {rank} failed in {status.stage}: {name}: {text}", rank)


class WorkerGroup(StartingWorkers):
    """The shared memory of a group on one host, with this process as rank 0, and the processes of its workers.

    A subclass starts the processes, or finds them, and puts them into `_processes` by rank.
    """

    def __init__(self, size: int, options: LaunchOptions) -> None:
        """Create the memory. Raises ConfigError."""
        if not 2 <= size <= MAX_RANKS:
            raise ConfigError(f"a group of processes must have 2 to {MAX_RANKS} ranks, got {size}")
        memory = SharedMemoryFile.create({**group_areas(size), **subgroup_areas(options.subgroups), **options.areas})
        ProcessBarrier.initialise(memory, size)
        super().__init__(size, options, StartupBoard(memory), memory, ProcessBarrier(memory, 0, size))
        self._subgroups = initialise_subgroups(memory, options.subgroups)
        self.session = secrets.token_hex(16)
        self.communicator = ShmCommunicator(self.memory, self.barrier)
        self.ring = RingWriter(self.memory, self.barrier)
        self._monitor = ProcessMonitor(
            self.barrier, self._subgroups, watchdog_timeout_s=options.watchdog_timeout_s, on_abort=self._kill_soon
        )
        self._processes: dict[int, WorkerProcess] = {}

    @property
    def pids(self) -> dict[int, int]:
        """The pids of the workers by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def stats(self) -> list[RankStats]:
        """Return the statistics of each rank, the leader included: of a rank in a subgroup the barriers of that."""
        cause = self.barrier.abort_cause
        found: list[RankStats] = []
        for rank in range(self.size):
            counts = rank_counts(rank, self.barrier, self._subgroups)
            pid = os.getpid() if rank == 0 else self.barrier.pid(rank) or self.pids.get(rank, 0)
            state = self.board.read(rank).state if cause is None else "failed" if cause[0] == rank else "ended"
            found.append(
                RankStats(
                    rank=rank,
                    pid=pid,
                    state=state,
                    memory_bytes=resident_bytes(pid),
                    num_barriers=counts.num_barriers,
                    num_waits=counts.num_waits,
                    wait_s=counts.wait_s,
                    num_bytes=counts.num_bytes,
                )
            )
        return found

    def _on_ready(self) -> None:
        self._monitor.watch_barriers()

    # End

    def close(self) -> None:
        """Close the group, and kill workers that do not leave within 5 s. May be called twice, and after a failure."""
        if self._is_closed:
            return
        self.barrier.abort(0, AbortReason.CLOSED)
        end_s = time.monotonic() + (_CLOSE_S if self.barrier.abort_cause == (0, AbortReason.CLOSED) else _LEAVE_S)
        for process in self._processes.values():
            try:
                process.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("a worker (pid %d) does not end by itself and is killed", process.pid)
        self.kill()

    def kill(self) -> None:
        """Kill the remaining workers and release everything."""
        self._is_closed = True
        self.barrier.abort(0, AbortReason.CLOSED)
        self._kill_processes()
        for process in self._processes.values():
            process.wait()
        self._on_ended()
        self._monitor.close()
        self.memory.close()

    def _on_ended(self) -> None:
        """Called when all processes have ended."""
        self._call_on_end()

    def _kill_processes(self) -> None:
        for process in self._processes.values():
            process.kill()

    def _kill_soon(self) -> None:
        """Called by the monitor when the group is aborted: processes that do not leave their step, such as a stopped one or one
        that waits for a GPU, are killed."""
        if not self._is_closed and self.barrier.abort_cause != (0, AbortReason.CLOSED):
            timer = threading.Timer(_LEAVE_S, self._kill_processes)
            timer.daemon = True
            try:
                timer.start()
            except RuntimeError:  # the system has no thread for it
                self._kill_processes()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def group_areas(size: int) -> dict[str, int]:
    """Return the areas of shared memory that every group has."""
    return {**ProcessBarrier.areas(size), **ShmCommunicator.areas(size), **ring_areas(size), **StartupBoard.areas(size)}


def subgroup_areas(subgroups: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the areas of the barriers of subgroups; see LaunchOptions."""
    areas = [ProcessBarrier.areas(len(ranks), name) for name, ranks in subgroups.items()]
    return {name: num_bytes for each in areas for name, num_bytes in each.items()}


def initialise_subgroups(memory: SharedMemoryFile, subgroups: Mapping[str, Sequence[int]]) -> list[ProcessBarrier]:
    """Initialise the barriers of subgroups, before any rank attaches; return them, for a process that does not wait in them."""
    num_ranks, cores = sum(map(len, subgroups.values())), num_usable_cores()
    for name, ranks in subgroups.items():
        ProcessBarrier.initialise(memory, len(ranks), name, cores * len(ranks) // num_ranks)
    return [ProcessBarrier(memory, 0, len(ranks), name, ranks) for name, ranks in subgroups.items()]


def attach_subgroups(memory: SharedMemoryFile, rank: int, subgroups: Mapping[str, Sequence[int]]) -> dict[str, ProcessBarrier]:
    """Return the barriers of the subgroups that a rank is in."""
    found: dict[str, ProcessBarrier] = {}
    for name, ranks in subgroups.items():
        if rank in ranks:
            found[name] = ProcessBarrier(memory, ranks.index(rank), len(ranks), name, ranks)
            found[name].set_pid(os.getpid())
    return found


def rank_counts(rank: int, barrier: ProcessBarrier, subgroups: Sequence[ProcessBarrier]) -> RankCounts:
    """Return the statistics of a rank's barriers: those of its subgroup, if it is in one."""
    own = next((each for each in subgroups if rank in each.ranks), barrier)
    return own.counts(own.ranks.index(rank))


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
