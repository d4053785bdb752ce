"""EngineProcess: one engine process, and the server's end of its socket."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, BinaryIO, Protocol

import msgspec
import zmq

from quire.base.environment import environment_with_quire
from quire.base.errors import ConfigError, WorkerError
from quire.base.logging import get_logger
from quire.contracts.config import EngineConfig
from quire.serving.engine_client.framing import (
    MAX_FRAME_BYTES,
    SESSION_BYTES,
    FrameReader,
    FrameWriter,
    Received,
    beat,
    is_readable,
)
from quire.serving.engine_client.kv_events import KvEventOptions
from quire.serving.engine_client.messages import FromEngine, Start
from quire.serving.engine_client.process import write_start

ENGINE_COMMAND = (sys.executable, "-P", "-m", "quire.serving.engine_client.process")
_MAX_PATH_BYTES = 100  # of a Unix socket; the operating system's limit is 108 or 104
_MAX_FRAMES_AT_ONCE = 64
_KILL_WAIT_S = 5.0
_LAST_LINES_S = 1.0  # to read the log of a process that has ended


class Process(Protocol):
    """What is used of subprocess.Popen."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


class Launcher(Protocol):
    """Starts engines' processes on other hosts."""

    @property
    def address(self) -> str:
        """Of this host, for those processes."""
        ...

    def launch(self, start: Start, command: tuple[str, ...], environment: Mapping[str, str]) -> Process:
        """Start a process and give it its Start message, on a standard input that stays open as long as this process lives.
        Raises OSError."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ReportOptions:
    """What the process logs, publishes and records; see LinkOptions."""

    log_level: str = "INFO"
    log_format: str = "text"
    kv_events: KvEventOptions | None = None
    records_timelines: bool = False


class EngineProcess:
    """The process starts in the constructor; `on_frame` is then called in the event loop for each received frame.

    With a launcher it runs on any host: the connection is TCP then, encrypted with a key that only its Start message has. The
    socket's path is removed as soon as the process is connected (`seal`), so nobody else can connect and nothing is left
    behind, however both end. Create it in the main thread, or in a thread that outlives the process: when the creating
    thread ends, the kernel signals that the parent has died.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_frame: Callable[[Received[FromEngine]], None],
        command: tuple[str, ...] = ENGINE_COMMAND,
        environment: Mapping[str, str] | None = None,
        reports: ReportOptions | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        """environment: variables in addition to those of this process."""
        reports = ReportOptions() if reports is None else reports
        self._on_frame = on_frame
        self._loop = asyncio.get_running_loop()
        session = secrets.token_bytes(SESSION_BYTES)
        self.writer = FrameWriter(session)
        self.reader: FrameReader[FromEngine] = FrameReader(session, FromEngine)
        self._is_closed = False
        self._folder = Path(tempfile.mkdtemp(prefix="quire-"))  # with mode 0700
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        for option, value in {zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.MAXMSGSIZE: MAX_FRAME_BYTES, zmq.LINGER: 0}.items():
            self._socket.setsockopt(option, value)
        try:
            address, server_key = self._bind() if launcher is None else self._bind_network(launcher.address)
            start = Start(
                address=address,
                server_key=server_key,
                session=session,
                parent_pid=os.getpid(),
                config=dataclasses.asdict(config),
                log_level=reports.log_level,
                log_format=reports.log_format,
                kv_events=reports.kv_events,
                records_timelines=reports.records_timelines,
            )
            self._process = (
                _spawn(command, environment or {}, reports)
                if launcher is None
                else launcher.launch(start, command, environment or {})
            )
        except BaseException:
            self._release()
            raise
        output = self._process.stdout
        try:
            self._log = None if output is None else EngineLog(os.fdopen(os.dup(output.fileno()), "rb"))
        except BaseException:
            self._process.kill()
            self._release()
            raise
        if output is not None:
            output.close()
        self._send_start(write_start(start))
        self._loop.add_reader(int(self._socket.get(zmq.FD)), self.drain)
        self._loop.call_soon(self.drain)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def num_sent(self) -> int:
        """The number of commands sent, which is the next sequence number."""
        return self.writer.num_sent

    def send(self, message: msgspec.Struct) -> int:
        """Send a command and return its sequence number. Raises MessageError, and WorkerError if the process does not receive
        it."""
        sequence = self.writer.num_sent
        frame = self.writer.write(message)
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise WorkerError(f"the engine's process takes no commands: {error}") from error
        # Sending may consume the event that the socket is readable, which the event loop would then miss.
        if is_readable(self._socket):
            self._loop.call_soon(self.drain)
        return sequence

    def drain(self) -> None:
        """Read received frames, up to a limit; the rest is read in the next iteration of the event loop."""
        for _ in range(_MAX_FRAMES_AT_ONCE):
            if self._is_closed or not is_readable(self._socket):
                return
            self._on_frame(self.reader.read(self._socket.recv(zmq.NOBLOCK)))
        self._loop.call_soon(self.drain)

    def seal(self) -> None:
        """Remove the socket's path; the existing connection stays."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def has_exited(self) -> bool:
        """Whether the process has exited, not by a signal."""
        status = self._process.poll()
        return status is not None and status >= 0

    def describe_end(self) -> str | None:
        """Return how the process ended; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        if status >= 0:
            return f"exit status {status}"
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"

    def kill(self) -> None:
        """Kill the process, even if it is stopped or hangs."""
        if self._process.poll() is None:
            self._process.kill()

    async def close(self, grace_s: float = 0.0) -> None:
        """End the process, killing it after grace_s, and remove its files. May be called again."""
        await self._wait(grace_s)
        self.kill()
        await self._wait(_KILL_WAIT_S)
        if not self._is_closed:
            self._loop.remove_reader(int(self._socket.get(zmq.FD)))
        self._release()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._log is not None:
            await asyncio.to_thread(self._log.join, _LAST_LINES_S)

    async def _wait(self, timeout_s: float) -> None:
        deadline_s = self._loop.time() + timeout_s
        while self._process.poll() is None and self._loop.time() < deadline_s:
            await asyncio.sleep(0.01)

    def _bind(self) -> tuple[str, bytes]:
        """Bind a Unix socket, which needs no key; return its address."""
        path = str(self._folder / "link")
        if len(path.encode()) > _MAX_PATH_BYTES:
            raise ConfigError(f"the folder for temporary files is too deep for a socket ({path}): set TMPDIR to a shorter path")
        self._socket.bind(f"ipc://{path}")
        return f"ipc://{path}", b""

    def _bind_network(self, host: str) -> tuple[str, bytes]:
        """Bind a free port; return its address, and the key without which nobody can connect."""
        public_key, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_server = True
        beat(self._socket)
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        return f"{address}:{self._socket.bind_to_random_port(address)}", public_key

    def _send_start(self, start: bytes) -> None:
        """Write the Start message; if the process has already ended, its exit status shows it."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.write(start)
            except BrokenPipeError:
                self._process.stdin.close()

    def _release(self) -> None:
        self._is_closed = True
        self._socket.close()
        self._context.term()
        self.seal()


def _spawn(command: tuple[str, ...], environment: Mapping[str, str], reports: ReportOptions) -> Process:
    stdout, stderr = (subprocess.PIPE, subprocess.STDOUT) if reports.log_format == "json" else (None, None)
    variables = {**environment_with_quire(), **environment}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, env=variables, bufsize=0)


logger = get_logger("quire.engine.output")

MAX_LINE_BYTES = 64 << 10  # of a longer one every piece is a line


class EngineLog:
    """Reads one pipe to its end in a thread of its own.

    Lines that are objects already, the engine's own log, go on as they are. Any other, written by a library or the interpreter
    below Python's logging, becomes a record of its own; whose request it is about nobody knows.
    """

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe
        self._thread = threading.Thread(target=self._read, name="quire-engine-log", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until all is read: until the process, and whoever has its pipe from it, have ended."""
        self._thread.join(timeout_s)

    def _read(self) -> None:
        with self._pipe:
            while line := self._pipe.readline(MAX_LINE_BYTES):
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                if _is_record(line):
                    sys.stderr.write(text + "\n")
                    sys.stderr.flush()
                elif text.strip():
                    logger.warning("%s", text)


def _is_record(line: bytes) -> bool:
    if not line.startswith(b"{"):
        return False
    try:
        return "logger" in msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except ValueError:
        return False
