"""Sandbox: does work for hostile input in forked processes that are killed when they take too much.

Compiling grammars and rendering chat templates use it.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypedDict

from quire.base.sandbox_server import SandboxedProcess, SandboxServer, SandboxServerError

_NUM_QUICK = 4
_NUM_SLOW = 2
_MAX_WAITING = 16
_NICENESS = 5
_MAX_LOST, _NUM_LOST_KNOWN = 3, 64
"""How often the system may end the process of a message until it is refused, and of how many messages that is known."""


class SandboxLimits(TypedDict, total=False):
    """The limits of a Sandbox, as it takes them."""

    max_cpu_s: float
    max_wall_s: float
    quick_s: float
    memory_bytes: int


class SandboxClosedError(Exception):
    """The sandbox has been closed."""


class SandboxLimitError(Exception):
    """A message took more time or memory than it may."""


class SandboxLostError(Exception):
    """The system has ended the process of a message, as it does where memory ends.

    num_lost  how often that has happened with this message
    is_final  whether that is too often to try again
    """

    def __init__(self, num_lost: int) -> None:
        super().__init__(f"the system has ended the process, {num_lost} times")
        self.num_lost = num_lost
        self.is_final = num_lost >= _MAX_LOST


class Sandbox:
    """Hands messages to processes; one that exceeds the limits ends, and its message is refused. Thread-safe.

    A few are answered at a time. One that is not done soon is paused until one of fewer places for slow ones is free, and
    then goes on at a lower priority: so it delays only other slow ones. A process that is free is used again.
    command       starts a SandboxServer
    max_cpu_s     seconds of computing that a message may take
    max_wall_s    seconds that it may take without being paused, for what waits instead of computing
    quick_s       seconds after which one is slow
    memory_bytes  address space of a process
    """

    def __init__(
        self,
        command: tuple[str, ...],
        *,
        max_cpu_s: float = 2.0,
        max_wall_s: float = 20.0,
        quick_s: float = 0.1,
        memory_bytes: int = 4 << 30,
    ) -> None:
        self._command = command
        self._limits = {"max_cpu_s": max_cpu_s, "memory_bytes": memory_bytes}
        self.max_cpu_s = max_cpu_s
        self._max_wall_s = max_wall_s
        self._quick_s = quick_s
        self._lock = threading.Lock()
        self._quick = threading.Semaphore(_NUM_QUICK)
        self._slow = threading.Semaphore(_NUM_SLOW)
        self._num_slow = 0
        self._starting: dict[str, threading.Lock] = {}
        self._servers: dict[str, SandboxServer] = {}
        self.idle: dict[str, list[SandboxedProcess]] = {}
        self._is_closed = False
        self._num_lost: OrderedDict[bytes, int] = OrderedDict()
        self.num_killed = 0

    @contextmanager
    def ask(self, setup: dict[str, Any], message: dict[str, Any]) -> Generator[dict[str, Any]]:
        """Hold the answer to a message, and where it was slow, its place.

        setup  what the process has to know before any message; there is a SandboxServer for each
        Raises SandboxClosedError, SandboxLimitError, SandboxLostError and SandboxServerError.
        """
        key = json.dumps(setup)
        with self._quick:
            worker, answer, may_wait = self._begin(key, message)
        if not may_wait:
            was_killed = self._give(key, worker, answer)
            yield self._checked(answer, was_killed, message)
            return
        try:
            with self._slow:
                try:
                    worker.resume(_NICENESS)
                    answer = worker.read(self._max_wall_s)
                finally:
                    was_killed = worker.end()
                yield self._checked(answer, was_killed, message)
        finally:
            with self._lock:
                self._num_slow -= 1

    @property
    def num_slow(self) -> int:
        """Messages that were not answered quickly and still run or wait."""
        return self._num_slow

    @property
    def servers(self) -> tuple[SandboxServer, ...]:
        """The servers that have been started and have not failed."""
        return tuple(self._servers.values())

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            self._is_closed = True
            idle = [worker for workers in self.idle.values() for worker in workers]
            self.idle.clear()
        for worker in idle:
            worker.end()
        for key, lock in tuple(self._starting.items()):
            with lock:
                server = self._servers.get(key)
                if server is not None:
                    server.close()

    def _begin(self, key: str, message: dict[str, Any]) -> tuple[SandboxedProcess, dict[str, Any] | None, bool]:
        """Return a process with its answer, or one that stands still (True).

        One that was used before may have been ended by the system: where it is found so at once, a new one is asked.
        """
        with self._lock:
            if self._is_closed:
                raise SandboxClosedError
            worker = self.idle[key].pop() if self.idle.get(key) else None
        if worker is not None:
            begin_s = time.monotonic()
            answer, may_wait = self._ask(worker, message)
            if may_wait or answer is not None or time.monotonic() - begin_s > self._quick_s:
                return worker, answer, may_wait
            worker.end()
        worker = self._fork(key)
        return worker, *self._ask(worker, message)

    def _ask(self, worker: SandboxedProcess, message: dict[str, Any]) -> tuple[dict[str, Any] | None, bool]:
        """Return the answer, None where there is none; or True where the process stands still, as it takes longer."""
        try:
            if worker.send(message) and worker.is_silent(min(self._quick_s, self._max_wall_s)) and self._begin_waiting():
                worker.pause()
                return None, True
            return worker.read(self._max_wall_s), False
        except BaseException:
            worker.end()
            raise

    def _begin_waiting(self) -> bool:
        """Return whether one more may stand still: such processes keep their memory."""
        with self._lock:
            may_wait = self._num_slow < _NUM_SLOW + _MAX_WAITING
            self._num_slow += may_wait
        return may_wait

    def _checked(self, answer: dict[str, Any] | None, was_killed: bool, message: dict[str, Any]) -> dict[str, Any]:
        if answer is None:
            num_lost = self._count_lost(message) if was_killed else 0
            with self._lock:
                if self._is_closed:
                    raise SandboxClosedError
                self.num_killed += not 0 < num_lost < _MAX_LOST
            if was_killed:
                raise SandboxLostError(num_lost)
            raise SandboxLimitError
        return answer

    def _count_lost(self, message: dict[str, Any]) -> int:
        """Return how often the system has ended the process of a message, this time included."""
        digest = hashlib.sha256(json.dumps(message).encode()).digest()
        with self._lock:
            count = self._num_lost.pop(digest, 0) + 1
            self._num_lost[digest] = count
            if len(self._num_lost) > _NUM_LOST_KNOWN:
                self._num_lost.popitem(last=False)
            return count

    def _fork(self, key: str) -> SandboxedProcess:
        try:
            server = self._server(key)
            try:
                return server.fork()
            except SandboxServerError:
                self._forget(key, server)
                return self._server(key).fork()  # the system may have ended the one before
        except SandboxServerError:
            if self._is_closed:
                raise SandboxClosedError from None
            raise

    def _give(self, key: str, worker: SandboxedProcess, answer: dict[str, Any] | None) -> bool:
        """Keep a process for the next message, or end one without an answer; return whether the system had killed it."""
        with self._lock:
            if answer is not None and not self._is_closed:
                self.idle.setdefault(key, []).append(worker)
                return False
        return worker.end()

    def _server(self, key: str) -> SandboxServer:
        with self._lock:
            lock = self._starting.setdefault(key, threading.Lock())
            if self._is_closed:
                raise SandboxClosedError
        with lock:
            if self._is_closed:
                raise SandboxClosedError
            if key not in self._servers:
                self._servers[key] = SandboxServer(self._command, json.loads(key), self._limits)
            if self._is_closed:  # meanwhile; `close` waits for the lock, and ends the server
                raise SandboxClosedError
            return self._servers[key]

    def _forget(self, key: str, server: SandboxServer) -> None:
        with self._starting[key]:
            if self._servers.get(key) is server:
                del self._servers[key]
        server.close()
