"""RemoteWorkers: a group whose ranks are on several hosts: messages over TCP, collectives over gloo."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from quire.base.errors import WorkerError
from quire.base.logging import get_logger
from quire.contracts.rank_stats import RankStats
from quire.parallel.barrier import AbortReason, ProcessBarrier
from quire.parallel.communicator import CountingCommunicator
from quire.parallel.launch import WorkerContext, run_main
from quire.parallel.message_socket import (
    SESSION_BYTES,
    ConnectionMonitor,
    MessageListener,
    SocketReader,
    SocketWriter,
    connect_to_leader,
)
from quire.parallel.rendezvous import Rendezvous
from quire.parallel.row_exchange import RowExchange
from quire.parallel.shared_memory import SharedMemoryFile
from quire.parallel.startup import StartupReporter, StoreBoard
from quire.parallel.torch_communicator import TorchCommunicator
from quire.parallel.worker_group import LaunchOptions, StartingWorkers, resident_bytes

if TYPE_CHECKING:
    from torch.distributed import Store

logger = get_logger(__name__)

_CLOSE_S = 5.0
_CONNECT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStart:
    """The start message of a worker on another host.

    address, port  of the leader's messages
    num_on_host    by rank: number of ranks on its host
    """

    size: int
    address: str
    port: int
    session: str
    log_level: str
    watchdog_timeout_s: float
    num_on_host: list[int]
    config: dict[str, Any]


class RemoteWorkers(StartingWorkers):
    """Workers of which some are on other hosts. Same interface as WorkerGroup; `memory` and `barrier` are the leader's own.

    A worker that ends is detected by its connection; one that hangs or is stopped by gloo's timeout, watchdog_timeout_s.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        hosts: Sequence[str],
        pids: Sequence[int],
        num_on_host: Sequence[int],
        config: Mapping[str, Any],
        options: LaunchOptions,
        store: Store,
    ) -> None:
        """hosts, pids, num_on_host: by rank. Raises WorkerError."""
        super().__init__(len(hosts), options, StoreBoard(store), *_own_barrier(len(hosts), 0, options.areas))
        self.store = store
        self._hosts, self._pids = hosts, pids
        self.num_on_host = num_on_host[0]
        session = os.urandom(SESSION_BYTES)
        self.address = address = socket.gethostbyname(rendezvous.address)
        listener = MessageListener(address, session)
        logger.info("rank 0 listens for messages at %s:%d", address, listener.port)
        start = RemoteStart(
            size=self.size,
            address=address,
            port=listener.port,
            session=session.hex(),
            log_level=options.log_level,
            watchdog_timeout_s=options.watchdog_timeout_s,
            num_on_host=list(num_on_host),
            config=dict(config),
        )
        store.set("group", json.dumps({"kind": "remote", "start": dataclasses.asdict(start)}))
        self._connections = listener.accept(self.size, options.start_timeout_s)
        self.ring = SocketWriter(self._connections, session, self.barrier)
        self._monitor = ConnectionMonitor(self.barrier, self._connections, self._describe_end)
        self._monitor.start()
        self.communicator = CountingCommunicator(_connect_gloo(store, 0, start, address, self.barrier))
        self.exchange = RowExchange(self.communicator, self.barrier)

    @property
    def pids(self) -> dict[int, int]:
        """The pids of the workers by rank, on their own hosts."""
        return {rank: pid for rank, pid in enumerate(self._pids) if rank > 0}

    def _describe_end(self, rank: int) -> tuple[AbortReason, str]:
        status = self.board.read(rank)
        name = f"rank {rank} (pid {self._pids[rank]} on {self._hosts[rank]})"
        if status.state == "failed" and status.error is not None:
            return AbortReason.FAILED, f"{name} failed: {status.error[1]}"
        return AbortReason.ENDED, f"{name} has ended: its connection is closed"

    def stats(self) -> list[RankStats]:
        """Return what is known here of each rank: of the workers little more than whether they are alive."""
        cause = self.barrier.abort_cause
        found: list[RankStats] = []
        for rank in range(self.size):
            state = self.board.read(rank).state if cause is None else "failed" if cause[0] == rank else "ended"
            found.append(RankStats(rank=rank, pid=self._pids[rank], host=self._hosts[rank], state=state))
        counts = self.barrier.counts(0)
        collectives = self.communicator.stats()
        found[0] = dataclasses.replace(
            found[0],
            memory_bytes=resident_bytes(os.getpid()),
            num_barriers=counts.num_barriers,
            num_waits=counts.num_waits,
            wait_s=counts.wait_s,
            num_bytes=counts.num_bytes,
            collectives=collectives,
        )
        return found

    def watch_barriers(self, barriers: Iterable[ProcessBarrier]) -> None:
        """See ConnectionMonitor."""
        self._monitor.watch_barriers(barriers)

    def _on_ready(self) -> None:
        pass

    def close(self) -> None:
        """Close the group and wait for the workers to leave; may be called twice, and after a failure."""
        if self._is_closed:
            return
        if self.barrier.abort(0, AbortReason.CLOSED):
            self.ring.close()
            self._wait_for_ends(_CLOSE_S)
        self.kill()

    def _wait_for_ends(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        for rank, connection in self._connections.items():
            connection.settimeout(max(0.01, end_s - time.monotonic()))
            try:
                connection.recv(1)
            except OSError as error:
                logger.warning("rank %d has not left within %.0f s: %s", rank, timeout_s, error)

    def kill(self) -> None:
        """Close all connections, which ends the workers, and release everything."""
        if self._is_closed:
            return
        self._is_closed = True
        self.barrier.abort(0, AbortReason.CLOSED)
        self._monitor.close()
        for connection in self._connections.values():
            connection.close()
        self.memory.close()
        self._call_on_end()


def _own_barrier(size: int, rank: int, areas: Mapping[str, int]) -> tuple[SharedMemoryFile, ProcessBarrier]:
    """Return memory and a barrier that no other rank shares: it holds the reason of the end, and statistics."""
    memory = SharedMemoryFile.create({**ProcessBarrier.areas(size), **areas})
    ProcessBarrier.initialise(memory, size)
    return memory, ProcessBarrier(memory, rank, size)


def _connect_gloo(store: Store, rank: int, start: RemoteStart, address: str, barrier: ProcessBarrier) -> TorchCommunicator:
    try:
        return TorchCommunicator.gloo(
            store,
            rank,
            start.size,
            timeout=timedelta(seconds=start.watchdog_timeout_s),
            check=barrier.check,
            hostname=address,
        )
    except RuntimeError as error:
        barrier.check()
        raise WorkerError(f"rank {rank} cannot connect to the other ranks over gloo from {address}: {error}", rank) from error


def run_remote(
    main: Callable[[WorkerContext], None], start: RemoteStart, store: Store, rendezvous: Rendezvous, own: Any
) -> int:
    """Run a worker of a group on several hosts; return the exit status."""
    rank, session = rendezvous.rank, bytes.fromhex(start.session)
    memory, barrier = _own_barrier(start.size, rank, {})
    connection = connect_to_leader(start.address, start.port, session, rank, _CONNECT_S)
    address = connection.getsockname()[0]
    ended = (AbortReason.ENDED, f"rank 0 at {start.address} has ended: its connection is closed")
    monitor = ConnectionMonitor(barrier, {0: connection}, lambda _: ended)
    monitor.start()
    communicator = CountingCommunicator(_connect_gloo(store, rank, start, address, barrier))
    context = WorkerContext(
        rank=rank,
        size=start.size,
        config=start.config,
        memory=memory,
        barrier=barrier,
        communicator=communicator,
        ring=SocketReader(connection, session, barrier),
        startup=StartupReporter(StoreBoard(store), rank),
        monitor=monitor,
        store_port=None,
        own=own,
        exchange=RowExchange(communicator, barrier),
        num_on_host=start.num_on_host[rank],
        address=address,
        store=store,
        local_rank=rendezvous.local_rank,
    )
    status = run_main(main, context)
    monitor.close()
    connection.close()
    return status
