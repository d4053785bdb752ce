"""Tensor-parallel workers, or pipeline stages, as threads of this process: an engine of several ranks starts in milliseconds.

The leader, the messages, the shared memory and the barriers are those of processes; only the processes are missing.
"""

from __future__ import annotations

import threading
from importlib import import_module
from types import SimpleNamespace

from torch.distributed import HashStore

from quire.contracts.rank_stats import RankStats
from quire.parallel.barrier import AbortReason, GroupClosedError, ProcessBarrier
from quire.parallel.launch import WorkerContext
from quire.parallel.ring import RingReader, RingWriter, ring_areas
from quire.parallel.shared_memory import SharedMemoryFile
from quire.parallel.shm_communicator import ShmCommunicator
from quire.parallel.startup import StartupBoard, StartupReporter
from quire.parallel.worker_group import attach_subgroups, initialise_subgroups, rank_counts, subgroup_areas

_STORES = {}  # by the memory of a group


class _Context(WorkerContext):
    __slots__ = ()

    def connect_store(self):
        return _STORES[id(self.memory)]


class ThreadWorkers:
    """Stands in for SpawnedWorkers."""

    def __init__(self, module, size, config, options):
        self.exchange = self.num_on_host = self.address = None
        self._main = import_module(module).main
        areas = {**ProcessBarrier.areas(size), **ShmCommunicator.areas(size), **ring_areas(size), **StartupBoard.areas(size)}
        areas |= {**subgroup_areas(options.subgroups), **options.areas}
        self.size, self.memory = size, SharedMemoryFile.create(areas)
        ProcessBarrier.initialise(self.memory, size)
        self.barrier = ProcessBarrier(self.memory, 0, size)
        self.subgroups = initialise_subgroups(self.memory, options.subgroups)
        self.communicator = ShmCommunicator(self.memory, self.barrier)
        self.store = HashStore() if options.with_store else None
        self.ring = RingWriter(self.memory, self.barrier)
        self.board = StartupBoard(self.memory)
        self.startup = StartupReporter(self.board, 0)
        self.errors = []
        self._threads = [threading.Thread(target=self._work, args=(rank, config), daemon=True) for rank in range(1, size)]
        for thread in self._threads:
            thread.start()
        self.pids = {}

    def _work(self, rank, config):
        barrier = ProcessBarrier(self.memory, rank, self.size)
        context = _Context(
            rank=rank,
            size=self.size,
            config=config,
            memory=self.memory,
            barrier=barrier,
            communicator=ShmCommunicator(self.memory, barrier),
            ring=RingReader(self.memory, barrier),
            startup=StartupReporter(self.board, rank),
            monitor=SimpleNamespace(),
            store_port=None,
            subgroups=attach_subgroups(self.memory, rank, {each._name: each.ranks for each in self.subgroups}),
        )
        _STORES[id(self.memory)] = self.store
        try:
            self._main(context)
        except GroupClosedError:
            return
        except Exception as error:  # noqa: BLE001 - told by close
            self.errors.append(error)
            context.startup.failed(error)
            for each in (barrier, *self.subgroups):
                each.abort(rank, AbortReason.FAILED, f"rank {rank} failed: {error}")

    def raise_failure(self):
        if self.errors:
            raise self.errors[0]

    def wait_ready(self):
        while True:
            statuses = [self.board.read(rank) for rank in range(self.size)]
            if self.errors:
                raise self.errors[0]
            if all(status.state == "ready" for status in statuses[1:]):
                return statuses
            self._threads[0].join(0.002)

    def stats(self):
        found = []
        for rank in range(self.size):
            counts = rank_counts(rank, self.barrier, self.subgroups)
            found.append(
                RankStats(
                    rank=rank,
                    num_barriers=counts.num_barriers,
                    num_waits=counts.num_waits,
                    wait_s=counts.wait_s,
                    num_bytes=counts.num_bytes,
                )
            )
        return found

    def close(self):
        self.kill()
        assert self.errors == []

    def kill(self):
        for each in (self.barrier, *self.subgroups):
            each.abort(0, AbortReason.CLOSED)
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        self.memory.close()


def as_threads(monkeypatch, *places):
    """Let workers that a function at (module, name) starts be threads; return the list of the groups that are made."""
    made = []

    def spawn(*args):
        made.append(ThreadWorkers(*args))
        return made[-1]

    for place in places:
        monkeypatch.setattr(*place, spawn)
    return made
