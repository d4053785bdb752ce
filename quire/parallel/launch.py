"""Starting the other ranks of one host as processes (spawn_workers), and what such a process runs (run_worker)."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from quire.base import errors
from quire.base.environment import environment_with_quire
from quire.base.errors import ConfigError, QuireError, WorkerError
from quire.base.logging import get_logger, setup_logging
from quire.base.processes import end_with_parent, read_with_length, with_length
from quire.contracts.parallel import MAX_RANKS
from quire.parallel.barrier import AbortReason, GroupClosedError, ProcessBarrier
from quire.parallel.process_monitor import WATCHDOG_TIMEOUT_S, ProcessMonitor
from quire.parallel.ring import RingReader, RingWriter, ring_areas
from quire.parallel.shared_memory import SharedMemoryFile
from quire.parallel.shm_communicator import ShmCommunicator
from quire.parallel.startup import StartupBoard, StartupReporter, StartupStatus

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

logger = get_logger(__name__)

_POLL_S = 0.01
_LATE_S = 20.0
"""After so long, and again after each so long, the log says what a rank that is not ready does."""

_LEAVE_S = 0.5
"""What the ranks of a group that was aborted have to leave their step, before they are killed."""

_CLOSE_S = 5.0
EXIT_FAILED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """How workers are started.

    start_timeout_s     until all are ready; then all are killed
    watchdog_timeout_s  see ProcessMonitor
    areas               further areas of the shared memory, by name, in bytes
    with_store          make a store of torch.distributed on this host, for gloo or NCCL: its port is bound before a worker
                        learns it, so two groups that start at once cannot choose the same
    log_level           of the workers
    pass_fds            further descriptors that every worker inherits, under the same numbers
    """

    start_timeout_s: float = 600.0
    watchdog_timeout_s: float = WATCHDOG_TIMEOUT_S
    areas: Mapping[str, int] = field(default_factory=dict)
    with_store: bool = False
    log_level: str = "INFO"
    pass_fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """What a worker reads from its standard input."""

    rank: int
    size: int
    descriptor: int
    parent_pid: int
    session: str
    log_level: str
    watchdog_timeout_s: float
    store_port: int | None
    config: dict[str, Any]


class SpawnedWorkers:
    """Workers of a leader on the same host, from their start to their end.

    The leader is rank 0. A thread of their own starts the workers and lives as long as they do: the kernel kills them where the
    thread that started them ends (PR_SET_PDEATHSIG), and the caller's may end before.
    """

    def __init__(self, module: str, size: int, config: Mapping[str, Any], options: LaunchOptions) -> None:
        """Start `python -m module` for ranks 1 to size - 1, each with config (JSON). Raises ConfigError."""
        if not 2 <= size <= MAX_RANKS:
            raise ConfigError(f"a group of processes must have 2 to {MAX_RANKS} ranks, got {size}")
        self.size = size
        self._options = options
        self._began_s = time.monotonic()
        self._is_closed = False
        self.session = secrets.token_hex(16)
        self.memory = SharedMemoryFile.create({**_areas(size), **options.areas})
        ProcessBarrier.initialise(self.memory, size)
        self.barrier = ProcessBarrier(self.memory, 0, size)
        self.communicator = ShmCommunicator(self.memory, self.barrier)
        self.ring = RingWriter(self.memory, self.barrier)
        self.board = StartupBoard(self.memory)
        self.startup = StartupReporter(self.board, 0)
        self.store: TCPStore | None = _make_store() if options.with_store else None
        self._monitor = ProcessMonitor(self.barrier, watchdog_timeout_s=options.watchdog_timeout_s, on_abort=self._kill_soon)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._spawned, self._ended = threading.Event(), threading.Event()
        self._spawn_error: Exception | None = None
        try:
            threading.Thread(target=self._spawn_all, args=(module, config), name="quire-workers", daemon=True).start()
            self._spawned.wait()
            if self._spawn_error is not None:
                raise self._spawn_error
            self._monitor.start()
        except BaseException:
            self.kill()
            raise

    def _spawn_all(self, module: str, config: Mapping[str, Any]) -> None:
        """Start the workers, and stay until they have ended."""
        try:
            for rank in range(1, self.size):
                self._spawn(module, rank, config)
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits for the start
            self._spawn_error = error
        self._spawned.set()
        self._ended.wait()

    def _spawn(self, module: str, rank: int, config: Mapping[str, Any]) -> None:
        start = _Start(
            rank=rank,
            size=self.size,
            descriptor=self.memory.descriptor,
            parent_pid=os.getpid(),
            session=self.session,
            log_level=self._options.log_level,
            watchdog_timeout_s=self._options.watchdog_timeout_s,
            store_port=None if self.store is None else self.store.port,
            config=dict(config),
        )
        body = json.dumps(dataclasses.asdict(start)).encode()
        process = subprocess.Popen(
            (sys.executable, "-P", "-m", module),
            stdin=subprocess.PIPE,
            env=environment_with_quire(),
            pass_fds=(self.memory.descriptor, *self._options.pass_fds),
            bufsize=0,
        )
        self._processes[rank] = process
        self._monitor.watch(rank, process.pid)
        assert process.stdin is not None
        try:
            process.stdin.write(with_length(body))
            process.stdin.close()
        except BrokenPipeError:
            logger.debug("rank %d has ended before it was told what to do; the monitor will say how", rank)

    @property
    def pids(self) -> dict[int, int]:
        """The processes of the workers by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    # Start

    def wait_ready(self) -> list[StartupStatus]:
        """Wait until all workers are ready; return what each rank has said, the leader included.

        Raises what a worker failed with, in its class where that is one of quire's; or WorkerError, also after
        start_timeout_s. All workers are killed then.
        """
        end_s, report_s = self._began_s + self._options.start_timeout_s, self._began_s + _LATE_S
        try:
            while True:
                statuses = [self.board.read(rank) for rank in range(self.size)]
                for rank in range(1, self.size):
                    self._raise_failure(rank, statuses[rank])
                if all(status.state == "ready" for status in statuses[1:]):
                    self._monitor.watch_barriers()
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

    def _raise_failure(self, rank: int, status: StartupStatus) -> None:
        if status.state != "failed" or status.error is None:
            return
        name, text = status.error
        kind = getattr(errors, name, None)
        told = f"rank {rank} failed in {status.stage}: {text}"
        if isinstance(kind, type) and issubclass(kind, QuireError) and not issubclass(kind, WorkerError):
            raise kind(told)
        raise WorkerError(told if kind is not None else f"rank {rank} failed in {status.stage}: {name}: {text}", rank)

    # End

    def close(self) -> None:
        """Let all workers leave, and kill those that do not within 5 s. May be called twice, and after a failure."""
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
        """Kill what is left of the workers and release everything."""
        self._is_closed = True
        self.barrier.abort(0, AbortReason.CLOSED)
        self._kill_processes()
        for process in self._processes.values():
            process.wait()
        self._ended.set()
        self._monitor.close()
        self.memory.close()

    def _kill_processes(self) -> None:
        for process in self._processes.values():
            process.kill()

    def _kill_soon(self) -> None:
        """Called by the monitor when the group is aborted: what does not leave its step by itself, such as a stopped process
        or one that waits for a GPU, is killed."""
        if not self._is_closed and self.barrier.abort_cause != (0, AbortReason.CLOSED):
            timer = threading.Timer(_LEAVE_S, self._kill_processes)
            timer.daemon = True
            timer.start()

    def __enter__(self) -> SpawnedWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def spawn_workers(module: str, size: int, config: Mapping[str, Any], options: LaunchOptions | None = None) -> SpawnedWorkers:
    """Start the workers of a group of `size` ranks, whose leader this process is; return at once, see wait_ready.

    module  run as `python -m module`, calls run_worker; named, so that this package knows no model
    config  what the workers are given: JSON
    """
    return SpawnedWorkers(module, size, config, options or LaunchOptions())


def _areas(size: int) -> dict[str, int]:
    return {**ProcessBarrier.areas(size), **ShmCommunicator.areas(size), **ring_areas(size), **StartupBoard.areas(size)}


def _make_store() -> TCPStore:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


# The worker's process


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker's main function has.

    config   what the leader gave to spawn_workers
    startup  to say which stage of the start this is, and when it is ready
    ring     messages of the leader
    """

    rank: int
    size: int
    config: dict[str, Any]
    memory: SharedMemoryFile
    barrier: ProcessBarrier
    communicator: ShmCommunicator
    ring: RingReader
    startup: StartupReporter
    monitor: ProcessMonitor
    store_port: int | None

    def connect_store(self) -> Store:
        """Connect to the leader's store (LaunchOptions.with_store)."""
        from torch.distributed import TCPStore

        if self.store_port is None:
            raise ConfigError("the leader has made no store: LaunchOptions(with_store=True)")
        return TCPStore("127.0.0.1", self.store_port, is_master=False)


def run_worker(main: Callable[[WorkerContext], None]) -> NoReturn:
    """Be one worker: read the start message, call main, and end the process.

    main has to call context.startup.ready(), and to return when the leader says so. GroupClosedError, which every wait
    raises when the leader closes the group, is a good end, too. Any other error ends the group with its text.
    """
    status = _run_worker(main)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: to take down the interpreter with torch in it takes half a second, for which the leader would wait.
    os._exit(status)


def _run_worker(main: Callable[[WorkerContext], None]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the leader closes the group
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start = _read_start(open(0, "rb", buffering=0, closefd=False))  # noqa: SIM115 - as long as the process
    setup_logging(start.log_level)
    if not end_with_parent(start.parent_pid):
        logger.warning("rank %d ends: the leader's process has ended", start.rank)
        return EXIT_FAILED
    memory = SharedMemoryFile(start.descriptor)
    barrier = ProcessBarrier(memory, start.rank, start.size)
    startup = StartupReporter(StartupBoard(memory), start.rank)
    monitor = ProcessMonitor(barrier, watchdog_timeout_s=start.watchdog_timeout_s)
    monitor.start()
    try:
        startup.stage("initialising")
        context = WorkerContext(
            rank=start.rank,
            size=start.size,
            config=start.config,
            memory=memory,
            barrier=barrier,
            communicator=ShmCommunicator(memory, barrier),
            ring=RingReader(memory, barrier),
            startup=startup,
            monitor=monitor,
            store_port=start.store_port,
        )
        main(context)
    except GroupClosedError:
        return 0
    except Exception as error:
        cause = barrier.abort_cause
        if cause is not None and cause[0] != start.rank:
            logger.debug("rank %d ends: %s", start.rank, error)  # another rank is at fault: the leader says so
            return EXIT_FAILED
        text = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, QuireError):
            logger.exception("rank %d failed", start.rank)
        startup.failed(error)
        barrier.abort(start.rank, AbortReason.FAILED, f"{barrier.describe_rank(start.rank)} failed: {text}")
        return EXIT_FAILED
    return 0


def _read_start(lifeline: BinaryIO) -> _Start:
    try:
        return _Start(**json.loads(read_with_length(lifeline)))
    except (EOFError, ValueError, TypeError) as error:
        raise ConfigError(f"this process is started by the leader of a group only: no start message came ({error})") from error
