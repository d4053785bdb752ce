"""The compile server: a process that compiles kernels into Triton's cache, each in a forked child.

`python -m quire.kernels.triton.compile_server FD ARCH` talks over the socket FD. It imports no torch, which would take seconds,
and what Triton does once, such as hashing itself, it has done before children begin.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import triton

from quire.kernels.triton.variant import Pointer, Variant, compile_variant

_NICE = 5
"""Below the process that waits: it needs its cores for itself."""

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

    Lists of variants, and numbers of those that are to be compiled next, arrive; for each variant its
    number is sent, and what was wrong, None if nothing.
    """

    def __init__(self, connection: Connection, arch: int, num_processes: int) -> None:
        self._connection, self._arch, self._num_processes = connection, arch, num_processes
        self._waiting: deque[tuple[int, Variant]] = deque()
        self._running: dict[Connection, tuple[BaseProcess, int, str]] = {}
        self._num_received = 0

    def serve(self) -> None:
        """Compile until the connection ends; what is then not yet compiled is given up."""
        while True:
            while self._waiting and len(self._running) < self._num_processes:
                self._start(*self._waiting.popleft())
            for ready in wait([self._connection, *self._running]):
                if ready is not self._connection:
                    self._collect(self._running.pop(ready), ready)  # type: ignore[index]
                elif not self._receive():
                    for process, *_ in self._running.values():
                        process.kill()
                    return

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
        receiver, sender = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_compile, args=(sender, variant, self._arch))
        process.start()
        sender.close()
        self._running[receiver] = process, index, variant.kernel

    def _collect(self, running: tuple[BaseProcess, int, str], receiver: Connection) -> None:
        process, index, kernel = running
        try:
            error: str | None = receiver.recv()
        except EOFError:
            process.join()
            error = f"{kernel}: the process that compiled it ended with {process.exitcode}"
        process.join()
        receiver.close()
        self._connection.send((index, error))


def _compile(sender: Connection, variant: Variant, arch: int) -> None:
    try:
        compile_variant(variant, arch)
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises is told
        sender.send(f"{variant.kernel}: {type(error).__name__}: {error}")
    else:
        sender.send(None)


def _build_driver_library() -> None:
    """Build the library through which Triton calls the driver, where there is one: it takes a C compiler half a second."""
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        importlib.import_module("triton.backends.nvidia.driver").CudaUtils()


def main() -> None:
    """Serve the connection whose file descriptor is the first argument, for the compute capability that is the second."""
    connection, arch = Connection(int(sys.argv[1])), int(sys.argv[2])
    os.nice(_NICE)
    _FORK.Process(target=_build_driver_library).start()
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True  # also if it is in the cache
        compile_variant(_SMALL, arch)
    try:
        CompileServer(connection, arch, os.cpu_count() or 1).serve()
    except (BrokenPipeError, ConnectionResetError):
        sys.exit("whoever ordered kernels has gone")


if __name__ == "__main__":
    main()
