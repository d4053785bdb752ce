"""Ranks for tests: threads of one process, and forked processes."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from quire.parallel.barrier import ProcessBarrier
from quire.parallel.ring import ring_areas
from quire.parallel.shared_memory import SharedMemoryFile
from quire.parallel.shm_communicator import ShmCommunicator


def run_threads(size, body, timeout_s=120):
    """Call body(rank) in a thread per rank; return the results, or raise the first error."""
    results, failures = [None] * size, []

    def run(rank):
        try:
            results[rank] = body(rank)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    limit_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, limit_s - time.monotonic()))
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def start_processes(size, body):
    """Fork a child per rank, which exits with what body(rank) returns, 99 where it raises; return their ids."""
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                status = body(rank)
            finally:
                os._exit(status)
        pids.append(pid)
    return pids


def statuses_of(pids):
    """Wait for children; return how each exited, -N for signal N."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def open_descriptors() -> set[tuple[str, str]]:
    """The open file descriptors of this process, with what each refers to, after garbage of other tests has closed its own."""
    gc.collect()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:  # closed since it was listed, as the list's own is
            continue
    return found


def files_in_dev_shm(pid):
    """Return the files of /dev/shm that a process has open or mapped: what it could leave there."""
    folder = Path(f"/proc/{pid}")
    links = []
    for path in (folder / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            links.append(os.readlink(path))
    mapped = [line.split()[-1] for line in (folder / "maps").read_text().splitlines()]
    return sorted({name for name in (*links, *mapped) if name.startswith("/dev/shm")})


def command_lines_of_children(pid: int) -> dict[int, str]:
    """Return the command lines of the processes that a process has started and that still run, by pid."""
    found = {}
    for word in subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended since it was listed
            found[int(word)] = Path(f"/proc/{word}/cmdline").read_text()
    return found


def wait_until(is_so, limit_s=60.0):
    """Wait so long at most; return whether it is so."""
    end_s = time.monotonic() + limit_s
    while not is_so() and time.monotonic() < end_s:
        time.sleep(0.005)
    return is_so()


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def left_behind(*folders: str) -> set[str]:
    """What is in the folders, by default those where a process may leave something."""
    return {str(path) for folder in folders or ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).iterdir()}


def assert_nothing_new(before: set[str], *folders: str) -> None:
    """What is there now was there before, once nothing goes away any more: tests of other processes use the places, too."""
    end_s = time.monotonic() + 20.0
    while (found := left_behind(*folders) - before) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert found == set()


class SharedGroup:
    """The memory of a group, and what each rank makes of it."""

    def __init__(self, size, slot_bytes=4096, mailbox_bytes=1024, num_cores=None, **areas):
        self.size = size
        own = ShmCommunicator.areas(size, slot_bytes=slot_bytes, mailbox_bytes=mailbox_bytes)
        self.memory = SharedMemoryFile.create({**ProcessBarrier.areas(size), **own, **ring_areas(size), **areas})
        ProcessBarrier.initialise(self.memory, size, num_cores=num_cores)

    def barrier(self, rank):
        return ProcessBarrier(self.memory, rank, self.size)

    def communicator(self, rank):
        return ShmCommunicator(self.memory, self.barrier(rank))
