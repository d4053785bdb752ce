"""SandboxedCompiler: compiles constraints in processes that are killed when they take too much."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from quire.contracts.constraint import Constraint
from quire.grammar.compile_server import CompilerProcess, CompileServer, CompileServerError
from quire.grammar.errors import GrammarError, PassingError

SANDBOX_COMMAND = (sys.executable, "-P", "-m", "quire.grammar.sandbox_main")
_NUM_QUICK = 4
_NUM_SLOW = 2
_MAX_WAITING = 16
_NICENESS = 5
_MAX_LOST, _NUM_LOST_KNOWN = 3, 64
"""How often the system may end the process of a constraint until it is refused, and of how many constraints that is known."""
_CLOSED = "the engine has been closed"


class SandboxedCompiler:
    """Hands constraints to processes; one that exceeds the limits ends, and its constraint is refused. Thread-safe.

    A few are compiled at a time. One that is not done soon stands still until one of fewer places for slow ones is free, and
    then goes on more nicely than the rest: so it holds up no other but slow ones. A process that is free is used again.
    command       starts a CompileServer
    max_cpu_s     seconds of computing that a constraint may take
    max_wall_s    seconds that it may take without standing still, for what waits instead of computing
    quick_s       seconds after which one is slow
    memory_bytes  address space of a process
    """

    def __init__(
        self,
        command: tuple[str, ...] = SANDBOX_COMMAND,
        *,
        max_cpu_s: float = 2.0,
        max_wall_s: float = 20.0,
        quick_s: float = 0.1,
        memory_bytes: int = 4 << 30,
    ) -> None:
        self._command = command
        self._limits = {"max_cpu_s": max_cpu_s, "memory_bytes": memory_bytes}
        self._max_cpu_s = max_cpu_s
        self._max_wall_s = max_wall_s
        self._quick_s = quick_s
        self._lock = threading.Lock()
        self._quick = threading.Semaphore(_NUM_QUICK)
        self._slow = threading.Semaphore(_NUM_SLOW)
        self._num_slow = 0
        self._starting: dict[str, threading.Lock] = {}
        self._servers: dict[str, CompileServer] = {}
        self._idle: dict[str, list[CompilerProcess]] = {}
        self._is_closed = False
        self._num_lost: OrderedDict[str, int] = OrderedDict()
        self.num_killed = 0

    @contextmanager
    def probe(self, setup: dict[str, Any], constraint: Constraint) -> Iterator[dict[str, Any]]:
        """Compile a constraint there and hold the answer, and where it was slow, its place. Raises GrammarError.

        setup  what the process has to know of the vocabulary
        """
        key = json.dumps(setup)
        names = ("kind", "source", "whitespace_pattern", "disable_any_whitespace", "max_open_length")
        message = {name: getattr(constraint, name) for name in names}
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

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            self._is_closed = True
            idle = [worker for workers in self._idle.values() for worker in workers]
            self._idle.clear()
        for worker in idle:
            worker.end()
        for key, lock in tuple(self._starting.items()):
            with lock:
                server = self._servers.get(key)
                if server is not None:
                    server.close()

    def _begin(self, key: str, message: dict[str, Any]) -> tuple[CompilerProcess, dict[str, Any] | None, bool]:
        """Return a process with its answer, or one that stands still (True).

        One that was used before may have been ended by the system: where it is found so at once, a new one is asked.
        """
        with self._lock:
            if self._is_closed:
                raise GrammarError(_CLOSED)
            worker = self._idle[key].pop() if self._idle.get(key) else None
        if worker is not None:
            begin_s = time.monotonic()
            answer, may_wait = self._ask(worker, message)
            if may_wait or answer is not None or time.monotonic() - begin_s > self._quick_s:
                return worker, answer, may_wait
            worker.end()
        worker = self._fork(key)
        return worker, *self._ask(worker, message)

    def _ask(self, worker: CompilerProcess, message: dict[str, Any]) -> tuple[dict[str, Any] | None, bool]:
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
            num_lost = self._count_lost(json.dumps(message)) if was_killed else 0
            with self._lock:
                if self._is_closed:
                    raise GrammarError(_CLOSED)
                self.num_killed += not 0 < num_lost < _MAX_LOST
            if not was_killed:
                raise GrammarError(
                    f"compiling takes more than {self._max_cpu_s:g} s or the memory that is allowed: make it simpler"
                )
            ended = "the system has ended the process that compiles it, as it does where memory ends"
            if num_lost < _MAX_LOST:
                raise PassingError(f"{ended}: try again")
            raise GrammarError(f"{ended}, {num_lost} times: make it simpler")
        if answer.get("error") is not None:
            raise GrammarError(str(answer["error"]), cast("str | None", answer.get("pointer")))
        return answer

    def _count_lost(self, source: str) -> int:
        """Return how often the system has ended the process of a constraint, this time included."""
        with self._lock:
            count = self._num_lost.pop(source, 0) + 1
            self._num_lost[source] = count
            if len(self._num_lost) > _NUM_LOST_KNOWN:
                self._num_lost.popitem(last=False)
            return count

    def _fork(self, key: str) -> CompilerProcess:
        try:
            server = self._server(key)
            try:
                return server.fork()
            except CompileServerError:
                self._forget(key, server)
                return self._server(key).fork()  # the system may have ended the one before
        except CompileServerError as error:
            raise (GrammarError(_CLOSED) if self._is_closed else PassingError(str(error))) from None

    def _give(self, key: str, worker: CompilerProcess, answer: dict[str, Any] | None) -> bool:
        """Keep a process for the next constraint, or end one without an answer; return whether the system had killed it."""
        with self._lock:
            if answer is not None and not self._is_closed:
                self._idle.setdefault(key, []).append(worker)
                return False
        return worker.end()

    def _server(self, key: str) -> CompileServer:
        with self._lock:
            lock = self._starting.setdefault(key, threading.Lock())
            if self._is_closed:
                raise GrammarError(_CLOSED)
        with lock:
            if self._is_closed:
                raise GrammarError(_CLOSED)
            if key not in self._servers:
                self._servers[key] = CompileServer(self._command, json.loads(key), self._limits)
            return self._servers[key]

    def _forget(self, key: str, server: CompileServer) -> None:
        with self._starting[key]:
            if self._servers.get(key) is server:
                del self._servers[key]
        server.close()
