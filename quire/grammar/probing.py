"""Prober: compiles constraints in processes that are killed when they take too much."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import IO, Any, cast

import quire
from quire.contracts.constraint import Constraint
from quire.grammar.errors import GrammarError

PROBE_COMMAND = (sys.executable, "-P", "-m", "quire.grammar.probe_main")
_START_S = 60.0


class Prober:
    """Hands constraints to processes; one that exceeds the limits ends, and its constraint is refused. Thread-safe.

    A process that is free is used again; there are as many as calls at a time. They end with this process, too: their input
    closes, and an alarm of the system's ends one that is busy then.
    max_cpu_s     seconds of computing that a constraint may take
    max_wall_s    seconds altogether, for what waits instead
    memory_bytes  address space of a process
    """

    def __init__(
        self,
        command: tuple[str, ...] = PROBE_COMMAND,
        *,
        max_cpu_s: float = 2.0,
        max_wall_s: float = 10.0,
        memory_bytes: int = 4 << 30,
    ) -> None:
        self._command = command
        self._limits = {"max_cpu_s": max_cpu_s, "memory_bytes": memory_bytes}
        self._max_cpu_s = max_cpu_s
        self._max_wall_s = max_wall_s
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._busy: list[subprocess.Popen[bytes]] = []
        self._is_closed = False
        self.num_killed = 0

    def probe(self, setup: dict[str, Any], constraint: Constraint) -> dict[str, Any]:
        """Compile a constraint there and return the answer. Raises GrammarError when it is at fault or takes too much.

        setup  what the process has to know of the vocabulary
        """
        names = ("kind", "source", "whitespace_pattern", "disable_any_whitespace", "max_open_length")
        fields = {name: getattr(constraint, name) for name in names}
        message = json.dumps({"setup": setup, "constraint": fields})
        process = self._take()
        try:
            answer = self._ask(process, message)
        except BaseException:
            self._end(process)
            raise
        if answer is None:
            self._end(process)
            with self._lock:
                self.num_killed += 1
            raise GrammarError(
                f"compiling takes more than {self._max_cpu_s:g} s or the memory that is allowed: make it simpler"
            )
        self._give(process)
        if answer.get("error") is not None:
            raise GrammarError(str(answer["error"]), cast("str | None", answer.get("pointer")))
        return answer

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            self._is_closed = True
            processes = [*self._idle, *self._busy]
            self._idle.clear()
        for process in processes:
            process.kill()
            process.wait()
            _close_pipes(process)

    def _take(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_closed:
                raise GrammarError("the engine has been closed")
            if self._idle:
                process = self._idle.pop()
                self._busy.append(process)
                return process
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment(), bufsize=0, start_new_session=True
        )
        with self._lock:
            self._busy.append(process)
        self._write(process, json.dumps(self._limits))
        if self._read(process, _START_S) is None:
            self._end(process)
            raise GrammarError(f"the process that compiles did not start: exit status {process.returncode}")
        return process

    def _give(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._busy.remove(process)
            if not self._is_closed:
                self._idle.append(process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        with self._lock:
            if process in self._busy:
                self._busy.remove(process)
        _close_pipes(process)

    def _ask(self, process: subprocess.Popen[bytes], message: str) -> dict[str, Any] | None:
        return self._read(process, self._max_wall_s) if self._write(process, message) else None

    def _write(self, process: subprocess.Popen[bytes], message: str) -> bool:
        pipe = _pipe(process.stdin)
        data = memoryview(message.encode() + b"\n")
        try:
            while data:
                data = data[pipe.write(data) :]
        except (BrokenPipeError, ValueError):
            return False
        return True

    def _read(self, process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any] | None:
        """Return the next line, None when none comes in time or the process ends."""
        pipe = _pipe(process.stdout)
        deadline_s = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            left_s = deadline_s - time.monotonic()
            try:
                is_ready = left_s > 0 and bool(select.select([pipe], [], [], left_s)[0])
                part = os.read(pipe.fileno(), 1 << 16) if is_ready else b""
            except ValueError:  # closed meanwhile
                return None
            if not part:
                return None
            line += part
        return json.loads(line)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise GrammarError("the process that compiles has no pipe")
    return pipe


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _environment() -> dict[str, str]:
    """Return this process's environment, in which the same quire is found, also where it is not the installed one."""
    folder = str(Path(quire.__file__).resolve().parents[1])
    if folder in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return dict(os.environ)
    others = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": folder if not others else f"{folder}{os.pathsep}{others}"}
