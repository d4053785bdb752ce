"""The compile server: a process that compiles kernels into Triton's cache, in forked children.

`python -m quire.kernels.triton.compile_server FD ARCH` talks over the socket FD. It imports no torch, which would take seconds.
What Triton does once, such as hashing itself, is done before children begin.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from tempfile import TemporaryDirectory
from typing import NamedTuple

import triton

from quire.kernels.triton.variant import Pointer, Variant, compile_variant

_NICE = 5
"""Below the process that waits: it needs its cores for itself."""
_MOST_PROCESSES = 32
"""Each takes some 300 MB while it compiles."""

_SMALL = Variant(
    "quire.kernels.triton.activation_kernels",
    "_activate",
    (
        ("gate_ptr", Pointer("float32", 0)),
        ("up_ptr", None),
        ("out_ptr", Pointer("float32", 0)),
        ("gate_stride", 16),
        ("up_stride", 16),
    ),
    (("WIDTH", 16), ("BLOCK", 16), ("KIND", 0)),
    (("num_warps", 1),),
)
"""Compiled first, so that children find the compiler initialised."""

_FORK = multiprocessing.get_context("fork")


class CompileServer:
    """Compiles variants in the order in which they come; the connection ends when no more are wanted.

    It receives lists of variants, and numbers of those to compile next, and sends each variant's number with its error or None.
    """

    def __init__(self, connection: Connection, arch: int, num_processes: int) -> None:
        self._connection, self._arch, self._num_processes = connection, arch, num_processes
        self._waiting: deque[tuple[int, Variant]] = deque()
        self._idle: list[_Worker] = []
        self._running: dict[Connection, tuple[_Worker, int, Variant]] = {}
        self._num_received = 0

    def serve(self) -> None:
        """Compile until the connection ends; what is then not yet compiled is given up."""
        try:
            while True:
                while self._waiting and (self._idle or len(self._running) < self._num_processes):
                    self._start(*self._waiting.popleft())
                for ready in wait([self._connection, *self._running]):
                    if ready is not self._connection:
                        self._collect(*self._running.pop(ready))  # type: ignore[index]
                    elif not self._receive():
                        return
        finally:
            for worker in (*self._idle, *(worker for worker, *_ in self._running.values())):
                worker.process.kill()
                worker.process.join()

    def _receive(self) -> bool:
        """Take an order; return whether there may be others."""
        try:
            order: Sequence[Variant] | int = self._connection.recv()
        except EOFError:
            return False
        if isinstance(order, int):
            for entry in self._waiting:
                if entry[0] == order:
                    self._waiting.remove(entry)
                    self._waiting.appendleft(entry)
                    break
            return True
        for variant in order:
            importlib.import_module(variant.module)  # here, so that no child has to
            self._waiting.append((self._num_received, variant))
            self._num_received += 1
        return True

    def _start(self, index: int, variant: Variant) -> None:
        # A child that kept the server's connections would keep the others from seeing its end.
        worker = self._idle.pop() if self._idle else _Worker.start(self._arch, [self._connection, *self._running])
        worker.connection.send(variant)
        self._running[worker.connection] = worker, index, variant

    def _collect(self, worker: _Worker, index: int, variant: Variant) -> None:
        try:
            error: str | None = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join()
            worker.connection.close()
            error = f"{variant.kernel}: the process that compiled it ended with {worker.process.exitcode}"
        else:
            self._idle.append(worker)
        self._connection.send((index, error))


class _Worker(NamedTuple):
    """A forked child, which compiles one variant after the other: a fork may take as long as compiling."""

    process: BaseProcess
    connection: Connection

    @classmethod
    def start(cls, arch: int, inherited: Sequence[Connection]) -> _Worker:
        """Fork a child, which closes what it has inherited."""
        ours, theirs = _FORK.Pipe()
        process = _FORK.Process(target=_compile_all, args=(theirs, arch, [*inherited, ours]))
        process.start()
        theirs.close()
        return cls(process, ours)


def _compile_all(connection: Connection, arch: int, inherited: Sequence[Connection]) -> None:
    """Compile what arrives, until the connection ends."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    with suppress(EOFError, BrokenPipeError):  # the server has gone
        while True:
            variant: Variant = connection.recv()
            try:
                compile_variant(variant, arch)
            except Exception as error:  # noqa: BLE001 - whatever a compiler raises is told
                connection.send(f"{variant.kernel}: {type(error).__name__}: {error}")
            else:
                connection.send(None)


def _build_driver_library() -> None:
    """Build the library through which Triton calls the driver, where there is one: it takes a C compiler half a second."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        importlib.import_module("triton.backends.nvidia.driver").CudaUtils()


@contextmanager
def _ending_all() -> Iterator[None]:
    """End with this process, also by SIGTERM, all that it has started, assemblers too, and remove their files.

    Triton ignores a half-written kernel in its cache, as the file that it writes last is missing.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    with TemporaryDirectory(prefix="quire-compiling-", ignore_cleanup_errors=True) as tempfile.tempdir:
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.killpg(0, signal.SIGTERM)
            for child in multiprocessing.active_children():
                child.join()


def main() -> None:
    """Serve the connection whose file descriptor is the first argument, for the compute capability that is the second."""
    with _ending_all():
        _serve(Connection(int(sys.argv[1])), int(sys.argv[2]))


def _serve(connection: Connection, arch: int) -> None:
    os.nice(_NICE)
    _FORK.Process(target=_build_driver_library).start()
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True  # also if it is in the cache
        compile_variant(_SMALL, arch)
    with suppress(BrokenPipeError, ConnectionResetError):  # whoever ordered kernels has gone
        CompileServer(connection, arch, min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))).serve()


if __name__ == "__main__":
    main()
