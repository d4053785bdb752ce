"""Starts the other ranks of one host as processes (spawn_workers); run_worker is the main function of such a process."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from quire.base.environment import environment_with_quire
from quire.base.errors import ConfigError, QuireError, WorkerError
from quire.base.logging import get_logger, setup_logging
from quire.base.processes import end_with_parent, read_with_length, with_length
from quire.parallel.barrier import AbortReason, GroupClosedError, ProcessBarrier
from quire.parallel.communicator import Communicator
from quire.parallel.process_monitor import ProcessMonitor
from quire.parallel.ring import MessageReader, RingReader
from quire.parallel.row_exchange import RowExchange
from quire.parallel.shared_memory import SharedMemoryFile
from quire.parallel.shm_communicator import ShmCommunicator
from quire.parallel.startup import StartupBoard, StartupReporter
from quire.parallel.worker_group import LaunchOptions, WorkerGroup, attach_subgroups

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

    from quire.parallel.message_socket import ConnectionMonitor

logger = get_logger(__name__)

EXIT_FAILED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    """The start message of a worker, from the leader: on its standard input, or by the store if a launcher started it."""

    rank: int
    size: int
    descriptor: int
    parent_pid: int
    session: str
    log_level: str
    watchdog_timeout_s: float
    store_port: int | None
    config: dict[str, Any]
    subgroups: Mapping[str, Sequence[int]] = field(default_factory=dict)


class SpawnedWorkers(WorkerGroup):
    """Workers that the leader starts as processes of its host, from their start to their end.

    A thread of its own starts the workers and lives as long as they do: the kernel kills them when the thread that started
    them ends (PR_SET_PDEATHSIG).
    """

    def __init__(self, module: str, size: int, config: Mapping[str, Any], options: LaunchOptions) -> None:
        """Start `python -m module` for ranks 1 to size - 1, each with config (JSON). Raises ConfigError."""
        super().__init__(size, options)
        self.store: TCPStore | None = _make_store() if options.with_store else None
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
        """Start the workers, and wait until they have ended."""
        try:
            for rank in range(1, self.size):
                self._spawn(module, rank, config)
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits for the start
            self._spawn_error = error
        self._spawned.set()
        self._ended.wait()

    def _spawn(self, module: str, rank: int, config: Mapping[str, Any]) -> None:
        start = WorkerStart(
            rank=rank,
            size=self.size,
            descriptor=self.memory.descriptor,
            parent_pid=os.getpid(),
            session=self.session,
            log_level=self._options.log_level,
            watchdog_timeout_s=self._options.watchdog_timeout_s,
            store_port=None if self.store is None else self.store.port,
            config=dict(config),
            subgroups=dict(self._options.subgroups),
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
            logger.debug("rank %d has ended before it got its configuration; the monitor will report why", rank)

    def _on_ended(self) -> None:
        self._ended.set()


def spawn_workers(module: str, size: int, config: Mapping[str, Any], options: LaunchOptions | None = None) -> SpawnedWorkers:
    """Start the workers of a group of `size` ranks, with this process as the leader; return at once, see wait_ready.

    module  run as `python -m module`, calls run_worker; a name, so that this package does not import models
    config  the workers' configuration: JSON
    """
    return SpawnedWorkers(module, size, config, options or LaunchOptions())


def _make_store() -> TCPStore:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


# The worker's process


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The arguments of a worker's main function.

    config   the leader's argument of spawn_workers
    startup  reports the stage of the start, and when it is ready
    ring     messages of the leader
    leader_pid  of the leader's process if it is not this one's parent but on the same host
    own      what this process's starter has given to it, not the leader
    store    where the ranks of a launcher have met; None: the leader's, see connect_store
    local_rank  of this process on its host, as the launcher counts; None: all are on one host
    subgroups  the barriers of those of LaunchOptions.subgroups that this rank is in
    exchange if the ranks are on several hosts and share no memory: exchanges rows; `memory` and `barrier` are then this rank's
             own; num_on_host: number of ranks on this host; address: of this host, for the others
    """

    rank: int
    size: int
    config: dict[str, Any]
    memory: SharedMemoryFile
    barrier: ProcessBarrier
    communicator: Communicator
    ring: MessageReader
    startup: StartupReporter
    monitor: ProcessMonitor | ConnectionMonitor
    store_port: int | None
    leader_pid: int | None = None
    own: Any = None
    exchange: RowExchange | None = None
    num_on_host: int | None = None
    address: str | None = None
    subgroups: Mapping[str, ProcessBarrier] = field(default_factory=dict)
    store: Store | None = None
    local_rank: int | None = None

    def open_descriptor(self, number: int) -> int:
        """Return a descriptor of this process for the leader's descriptor `number` (LaunchOptions.pass_fds)."""
        return number if self.leader_pid is None else open_descriptor_of(self.leader_pid, number)

    def connect_store(self) -> Store:
        """Return the store of a launcher's ranks, or connect to the leader's (LaunchOptions.with_store)."""
        from torch.distributed import TCPStore

        if self.store is not None:
            return self.store
        if self.store_port is None:
            raise ConfigError("the leader has made no store: LaunchOptions(with_store=True)")
        return TCPStore("127.0.0.1", self.store_port, is_master=False)


def open_descriptor_of(pid: int, number: int) -> int:
    """Open an anonymous file of another process of this host and user. Raises WorkerError."""
    path = f"/proc/{pid}/fd/{number}"
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise WorkerError(
            f"the shared memory of rank 0 (pid {pid}) cannot be opened at {path}: {error.strerror}; ranks of one host must "
            "run as the same user and see each other's processes",
            0,
        ) from error


def run_worker(main: Callable[[WorkerContext], None]) -> NoReturn:
    """Run one worker: read the start message, call main, and end the process.

    main calls context.startup.ready(), and returns when the leader says so. GroupClosedError, which every wait raises when the
    leader closes the group, is a success, too. Any other error ends the group with its text.
    """
    status = _run_worker(main)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: finalizing an interpreter with torch takes half a second, for which the leader would wait.
    os._exit(status)


def _run_worker(main: Callable[[WorkerContext], None]) -> int:
    start = _read_start(open(0, "rb", buffering=0, closefd=False))  # noqa: SIM115 - as long as the process
    setup_logging(start.log_level)
    if not end_with_parent(start.parent_pid):
        logger.warning("rank %d ends: the leader's process has ended", start.rank)
        return EXIT_FAILED
    return run_attached(main, start, SharedMemoryFile(start.descriptor))


def run_attached(
    main: Callable[[WorkerContext], None],
    start: WorkerStart,
    memory: SharedMemoryFile,
    leader_pid: int | None = None,
    own: Any = None,
    store: Store | None = None,
    local_rank: int | None = None,
) -> int:
    """Run a worker of a group on this host whose memory is mapped; return the exit status. leader_pid, own, store, local_rank:
    see WorkerContext."""
    barrier = ProcessBarrier(memory, start.rank, start.size)
    startup = StartupReporter(StartupBoard(memory), start.rank)
    subgroups = attach_subgroups(memory, start.rank, start.subgroups)
    monitor = ProcessMonitor(barrier, tuple(subgroups.values()), watchdog_timeout_s=start.watchdog_timeout_s)
    monitor.start()
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
        leader_pid=leader_pid,
        own=own,
        subgroups=subgroups,
        store=store,
        local_rank=local_rank,
    )
    return run_main(main, context)


def run_main(main: Callable[[WorkerContext], None], context: WorkerContext) -> int:
    """Call a worker's main function, report a failure to the group, and return the exit status."""
    if threading.current_thread() is threading.main_thread():
        # A terminal or a launcher sends these to all ranks; the leader closes the group.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    barrier, rank = context.barrier, context.rank
    try:
        context.startup.stage("initialising")
        main(context)
    except GroupClosedError:
        return 0
    except Exception as error:
        cause = barrier.abort_cause
        if cause is not None and cause[0] != rank:
            logger.debug("rank %d ends: %s", rank, error)  # the leader reports the failure of the other rank
            return EXIT_FAILED
        text = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, QuireError):
            logger.exception("rank %d failed", rank)
        context.startup.failed(error)
        barrier.abort(rank, AbortReason.FAILED, f"{barrier.describe_rank(rank)} failed: {text}")
        return EXIT_FAILED
    return 0


def _read_start(lifeline: BinaryIO) -> WorkerStart:
    try:
        return WorkerStart(**json.loads(read_with_length(lifeline)))
    except (EOFError, ValueError, TypeError) as error:
        raise ConfigError(f"this process is started by the leader of a group only: no start message came ({error})") from error
