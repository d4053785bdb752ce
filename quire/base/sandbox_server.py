"""SandboxServer: a process that has loaded all that its work needs and forks others with limits, each in milliseconds.

The first half is the engine's side; `serve` is what the process itself runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from quire.base.environment import environment_with_quire
from quire.base.logging import get_logger

logger = get_logger(__name__)

_START_S = 60.0
_FORK_S = 10.0
_MAX_MESSAGE = 256
_STACK_BYTES = 4 << 20
"""Half of what the engine's threads have: what fits here, fits there."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class SandboxServerError(Exception):
    """A server, or a process of it, does not answer. The text continues "the process"."""


@dataclass(frozen=True, slots=True, eq=False)
class SandboxedProcess:
    """A process with limits; it leads a group and answers by lines. Its number stays its own until SandboxServer.end.

    server  which has forked it
    """

    pid: int
    connection: socket.socket
    server: SandboxServer

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
        line = bytearray()
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


class SandboxServer:
    """Client of the process. Thread-safe. Raises SandboxServerError when it does not start.

    command  starts a process that calls `serve`; the number of its socket follows
    setup    what its work needs
    limits   max_cpu_s and memory_bytes of a process that it forks
    """

    def __init__(self, command: tuple[str, ...], setup: dict[str, Any], limits: dict[str, Any]) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_broken = False  # a reply did not come in time, and would be taken for the next one's
        try:
            self.control, self._process = _start(command)
        except OSError as error:
            raise SandboxServerError(f"could not be started: {error}") from None
        try:
            self._hand_over({"setup": setup, "limits": limits})
        except OSError:
            self.close()
            raise SandboxServerError(f"did not start: exit status {self._process.returncode}") from None

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    def _hand_over(self, message: dict[str, Any]) -> None:
        self.control.settimeout(_START_S)
        if self._process.stdin is not None:
            with self._process.stdin as pipe:
                pipe.write(json.dumps(message).encode())
        if not self.control.recv(_MAX_MESSAGE):
            raise ConnectionResetError
        self.control.settimeout(_FORK_S)

    def fork(self) -> SandboxedProcess:
        """Return a new process. Raises SandboxServerError when the server is closed or has ended."""
        try:
            mine, theirs = socket.socketpair()
        except OSError as error:
            raise SandboxServerError(f"cannot be asked: {error}") from None
        try:
            with theirs, self._lock:
                pid = self._ask_for_fork(theirs)
        except OSError as error:
            self._is_broken = True
            mine.close()
            raise SandboxServerError(f"has ended: {error}") from None
        worker = SandboxedProcess(pid, mine, self)
        if worker.read(_FORK_S) is None:
            worker.end()
            raise SandboxServerError("did not begin")
        return worker

    def _ask_for_fork(self, theirs: socket.socket) -> int:
        if self._is_broken:
            raise ConnectionResetError("a reply of it was late")
        socket.send_fds(self.control, [json.dumps({"fork": True}).encode()], [theirs.fileno()])
        reply = self.control.recv(_MAX_MESSAGE)
        pid = json.loads(reply or b"{}").get("pid")
        if pid is None:
            raise ConnectionResetError("no reply")
        return pid

    def end(self, worker: SandboxedProcess, is_ending: bool) -> bool:
        """Kill a process that this one has forked, or wait for its end; return whether another had killed it.

        When this one has ended, or is closed, they end without being told, whatever they did.
        """
        with self._lock:
            if self._is_closed:
                return True
            if self._is_broken:
                return is_ending
            try:
                self.control.send(json.dumps({"end": worker.pid, "is_ending": is_ending}).encode())
                reply = self.control.recv(_MAX_MESSAGE)
            except OSError as error:
                logger.debug("the process that forks sandboxed processes has ended: %s", error)
                self._is_broken, reply = True, b""
        if not reply:  # the system has ended this one, and so perhaps the other
            return is_ending
        return json.loads(reply).get("signal") == signal.SIGKILL

    def close(self) -> None:
        """End the process, and all that it has forked, and wait for that."""
        with self._lock:
            self._is_closed = True
            self.control.close()
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


def serve(prepare: Callable[[dict[str, Any]], Answer]) -> None:
    """Fork and end processes as the socket asks, whose number is the last argument; end them all when it closes.

    prepare  takes the setup and returns what answers messages in the processes that are forked
    A process that has ended stays unreaped until it is to be ended, so that its number means no other.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what a library prints is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=int(sys.argv[-1]))
    start = json.loads(sys.stdin.buffer.read())
    answer = prepare(start["setup"])
    pids: set[int] = set()
    try:
        control.send(b"{}")
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, _MAX_MESSAGE, 1)
            if not message:
                break
            if descriptors:
                pids.add(_fork(control, descriptors[0], answer, start["limits"]))
            else:
                ended = json.loads(message)
                signal_number = _end(ended["end"], pids, ended["is_ending"])
                control.send(json.dumps({"signal": signal_number}).encode())
    except (BrokenPipeError, ConnectionResetError):
        pass  # the engine was killed: there is nobody to tell
    for pid in tuple(pids):
        _end(pid, pids)


def _end(pid: int, pids: set[int], is_ending: bool = False) -> int:
    """Kill a process, or wait for its end; return the signal that has ended it, 0 where it was none or this one's."""
    pids.remove(pid)
    os.kill(pid, signal.SIGCONT if is_ending else signal.SIGKILL)  # it may have been stopped on its way out
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if is_ending and os.WIFSIGNALED(status) else 0


def _fork(control: socket.socket, descriptor: int, answer: Answer, limits: dict[str, Any]) -> int:
    """Let a new process answer at a socket; return its number here."""
    pid = os.fork()
    if pid:
        os.close(descriptor)
        control.send(json.dumps({"pid": pid}).encode())
        return pid
    try:
        control.close()
        os.setsid()
        with contextlib.suppress(OSError):  # another system than Linux
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")  # where memory ends, this ends first
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"], hard))
        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=_answer_all, args=(socket.socket(fileno=descriptor), answer, limits["max_cpu_s"]))
        thread.start()
        thread.join()
    finally:
        os._exit(0)  # what the process that forks has registered for its end is none of this one's


def _answer_all(connection: socket.socket, answer: Answer, max_cpu_s: float) -> None:
    """Answer messages, line by line, until the other side closes; the system ends the process where one takes too much."""
    try:
        connection.sendall(b"{}\n")
        for line in connection.makefile("rb"):
            signal.setitimer(signal.ITIMER_PROF, max_cpu_s)  # SIGPROF ends a process
            reply = answer(json.loads(line))
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.sendall(json.dumps(reply).encode() + b"\n")
    except (BrokenPipeError, ConnectionResetError):
        pass  # as above
