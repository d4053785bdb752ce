"""ServerProcess: `quire serve` with one model as a child process, on a Unix socket. ServerLauncher starts them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from quire.base.environment import environment_with_quire
from quire.base.errors import ConfigError
from quire.base.private_folder import PrivateFolder
from quire.fleet.config import FleetConfig, ModelEntry
from quire.fleet.manager import ModelStartError
from quire.router.config import BackendAddress
from quire.router.upstream import Upstream, UpstreamError
from quire.serving.config import ApiKey

COMMAND = (sys.executable, "-m", "quire.cli.fleet_child")
"""Takes the id of this process and the file of the options."""
_POLL_S = 0.1
_ASK_TIMEOUT_S = 5.0
_KILL_AFTER_S = 5.0
"""In addition to the time for a drain."""
KEY_VARIABLE = "QUIRE_API_KEY"
"""With the key of clients, for `quire serve`."""
_OPTION_PREFIX = "QUIRE_SERVE_"


def child_environment() -> dict[str, str]:
    """Return the environment of a child, without the variables that set options of this server."""
    found = environment_with_quire()
    return {name: value for name, value in found.items() if not name.startswith(_OPTION_PREFIX) and name != KEY_VARIABLE}


class ServerProcess:
    """A started process. Its standard input stays open as long as this process lives, and it ends when that closes."""

    def __init__(self, process: subprocess.Popen[bytes], address: BackendAddress, drain_timeout_s: float) -> None:
        self._process = process
        self._address = address
        self._drain_timeout_s = drain_timeout_s

    @property
    def address(self) -> BackendAddress:
        """Where it listens."""
        return self._address

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    async def wait_ready(self) -> None:
        """Return when /ready answers 200. Raises ModelStartError when the process ends before."""
        upstream = Upstream(self._address, _ASK_TIMEOUT_S)
        try:
            while True:
                if self._process.poll() is not None:
                    raise ModelStartError(f"its process ended with {self._describe_end()}; the log above says why")
                with contextlib.suppress(UpstreamError):
                    async with await upstream.send("GET", b"/ready", [], idle_timeout_s=_ASK_TIMEOUT_S) as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(_POLL_S)
        finally:
            upstream.close()

    async def wait(self) -> str:
        """Return how it ended."""
        while self._process.poll() is None:
            await asyncio.sleep(_POLL_S)
        return self._describe_end()

    async def stop(self, *, hurry: bool = False) -> None:
        """Let it drain and end; kill it after that time, or at once with `hurry`."""
        process = self._process
        if process.poll() is None and not hurry:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._drain_timeout_s + _KILL_AFTER_S):
                    await self.wait()
        if process.poll() is None:
            process.kill()
            await self.wait()
        if process.stdin is not None:
            process.stdin.close()

    def kill(self) -> None:
        """End it at once, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _describe_end(self) -> str:
        status = self._process.returncode
        return f"exit status {status}" if status >= 0 else f"signal {-status} ({signal.strsignal(-status)})"


class ServerLauncher:
    """Starts the processes of a fleet. Their sockets, options and keys are in a PrivateFolder, which `with` removes."""

    def __init__(self, config: FleetConfig, router_key: str, command: Sequence[str] = COMMAND) -> None:
        """router_key: with which the router asks the processes, where keys are needed."""
        self._config = config
        self._command = tuple(command)
        self._private = PrivateFolder("quire-fleet-")
        self._folder = self._private.path
        self._numbers = {entry.name: number for number, entry in enumerate(config.models)}
        self._started: list[ServerProcess] = []
        self._key_file: Path | None = None
        if config.api_keys:
            self._key_file = self._folder / "keys.json"
            self._write(
                self._key_file, [*map(_key_entry, config.api_keys), {"name": "_fleet", "key": router_key, "admin": True}]
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()
        self._private.close()

    def kill(self) -> None:
        """End all processes at once."""
        for process in self._started:
            process.kill()

    def launch(self, entry: ModelEntry) -> ServerProcess:
        """Start the process of a model; it is not ready yet. Raises OSError and ConfigError.

        Call it from the main thread: the kernel ends the child with the thread that started it.
        """
        number = self._numbers[entry.name]
        path = self._folder / f"{number}.sock"
        options: dict[str, object] = {
            **entry.options,
            "uds": str(path),
            "served-model-name": [entry.name],
            "page": "false",
            "access-log": "false",
            "log-level": self._config.log_level,
            "max-body-bytes": str(self._config.max_body_bytes),
            "max-held-body-bytes": str(self._config.max_held_body_bytes),
        }
        if self._key_file is not None:
            options["api-key-file"] = str(self._key_file)
        file = self._folder / f"{number}.json"
        self._write(file, options)
        # A session of its own: Ctrl-C ends this process, which lets the children drain.
        process = subprocess.Popen(
            (*self._command, str(os.getpid()), str(file)),
            stdin=subprocess.PIPE,
            env=child_environment(),
            start_new_session=True,
        )
        address = BackendAddress("localhost", 80, uds=str(path), label=entry.name)
        started = ServerProcess(process, address, self._config.drain_timeout_s)
        self._started = [*(one for one in self._started if one.is_running), started]
        return started

    @staticmethod
    def _write(path: Path, content: object) -> None:
        """Write JSON, which is YAML too."""
        try:
            path.write_text(json.dumps(content), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


def _key_entry(key: ApiKey) -> dict[str, object]:
    """Return the entry of a file for --api-key-file."""
    entry: dict[str, object] = {
        "name": key.name,
        "sha256": key.sha256.hex(),
        "max_concurrent": key.max_concurrent,
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "weight": key.weight,
        "max_stored_files": key.max_stored_files,
        "max_stored_bytes": key.max_stored_bytes,
        "max_stored_batches": key.max_stored_batches,
        "admin": key.is_admin,
        "priority": key.may_use_interactive,
    }
    return {name: value for name, value in entry.items() if value is not None}
