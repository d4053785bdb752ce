"""CompileServer: a process that has read all it takes to compile and forks others, so that one more takes milliseconds."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from math import ceil
from typing import Any

from quire.base.environment import environment_with_quire
from quire.base.logging import get_logger

logger = get_logger(__name__)

_START_S = 60.0
_FORK_S = 10.0
_MAX_REPLY = 256


class CompileServerError(Exception):
    """A server, or a process of it, does not answer."""


@dataclass(frozen=True, slots=True, eq=False)
class CompilerProcess:
    """A process that compiles; it leads a group and answers by lines. Its number stays its own until CompileServer.end.

    server  which has forked it
    """

    pid: int
    connection: socket.socket
    server: CompileServer

    def send(self, message: dict[str, Any]) -> bool:
        """Send a line, which the process reads at once when it has nothing to do. Return whether it is alive."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def is_silent(self, timeout_s: float) -> bool:
        """Wait for the next bytes, or the process's end; return whether neither came in time."""
        poll = select.poll()  # select would refuse a number of 1024 or more, which a server with many connections has
        poll.register(self.connection, select.POLLIN)
        return not poll.poll(max(0, ceil(timeout_s * 1000)))

    def read(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next line, None when none comes in time or the process ends."""
        deadline_s = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            if self.is_silent(deadline_s - time.monotonic()):
                return None
            try:
                part = self.connection.recv(1 << 16)
            except OSError:
                return None
            if not part:
                return None
            line += part
        return json.loads(line)

    def pause(self) -> None:
        """Let it stand still until `resume`; it ends with its server all the same."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGSTOP)

    def resume(self, niceness: int) -> None:
        """Let it go on behind processes that are less nice."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it is as nice already, or nicer
            os.setpriority(os.PRIO_PGRP, self.pid, niceness)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def end(self) -> bool:
        """End it, whatever it does; return whether the system had killed it, as it does where memory ends."""
        was_killed = self.server.end(self, self._is_ending())
        self.connection.close()
        return was_killed

    def _is_ending(self) -> bool:
        """Whether it has let go of its socket, which it does only as it ends."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


class CompileServer:
    """Client of the process. Thread-safe. Raises CompileServerError when it does not start.

    command  starts it, as sandbox_main does: the number of its socket follows
    setup    what it has to know to compile: the backend, and of the vocabulary
    limits   max_cpu_s and memory_bytes of a process that it forks
    """

    def __init__(self, command: tuple[str, ...], setup: dict[str, Any], limits: dict[str, Any]) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_broken = False  # a reply did not come in time, and would be taken for the next one's
        try:
            self._control, self._process = _start(command)
        except OSError as error:
            raise CompileServerError(f"the process that compiles could not be started: {error}") from None
        try:
            self._hand_over({"setup": setup, "limits": limits})
        except OSError:
            self.close()
            raise CompileServerError(
                f"the process that compiles did not start: exit status {self._process.returncode}"
            ) from None

    def _hand_over(self, message: dict[str, Any]) -> None:
        self._control.settimeout(_START_S)
        if self._process.stdin is not None:
            with self._process.stdin as pipe:
                pipe.write(json.dumps(message).encode())
        if not self._control.recv(_MAX_REPLY):
            raise ConnectionResetError
        self._control.settimeout(_FORK_S)

    def fork(self) -> CompilerProcess:
        """Return a new process. Raises CompileServerError when the server is closed or has ended."""
        try:
            mine, theirs = socket.socketpair()
        except OSError as error:
            raise CompileServerError(f"no process can be asked to compile: {error}") from None
        try:
            with theirs, self._lock:
                pid = self._ask_for_fork(theirs)
        except OSError as error:
            self._is_broken = True
            mine.close()
            raise CompileServerError(f"the process that compiles has ended: {error}") from None
        worker = CompilerProcess(pid, mine, self)
        if worker.read(_FORK_S) is None:
            worker.end()
            raise CompileServerError("a process that compiles did not begin")
        return worker

    def _ask_for_fork(self, theirs: socket.socket) -> int:
        if self._is_broken:
            raise ConnectionResetError("a reply of it was late")
        socket.send_fds(self._control, [json.dumps({"fork": True}).encode()], [theirs.fileno()])
        reply = self._control.recv(_MAX_REPLY)
        pid = json.loads(reply or b"{}").get("pid")
        if pid is None:
            raise ConnectionResetError("no reply")
        return pid

    def end(self, worker: CompilerProcess, is_ending: bool) -> bool:
        """Kill a process that this one has forked, or wait for its end; return whether another had killed it.

        When this one has ended, or is closed, they end without being told, whatever they did.
        """
        with self._lock:
            if self._is_closed:
                return True
            if self._is_broken:
                return is_ending
            try:
                self._control.send(json.dumps({"end": worker.pid, "is_ending": is_ending}).encode())
                reply = self._control.recv(_MAX_REPLY)
            except OSError as error:
                logger.debug("the process that forks those that compile has ended: %s", error)
                self._is_broken, reply = True, b""
        if not reply:  # the system has ended this one, and so perhaps the other
            return is_ending
        return json.loads(reply).get("signal") == signal.SIGKILL

    def close(self) -> None:
        """End the process, and all that it has forked, and wait for that."""
        with self._lock:
            self._is_closed = True
            self._control.close()
        try:
            self._process.wait(_FORK_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _start(command: tuple[str, ...]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the process; return this side of its socket."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            return mine, subprocess.Popen(
                (*command, str(theirs.fileno())),
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=environment_with_quire(),
                start_new_session=True,
            )
        except BaseException:
            mine.close()
            raise
