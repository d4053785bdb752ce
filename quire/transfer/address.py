"""Addresses of page servers: tcp://HOST:PORT and unix:PATH."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass

from quire.base.errors import ConfigError

ALLOWED = "tcp://HOST:PORT or unix:PATH"
_TCP = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.%]+\]|[^\[\]:/\s]+):(?P<port>[0-9]{1,5})")
_MAX_PATH_BYTES = 107
_BACKLOG = 64


@dataclass(frozen=True, slots=True)
class Address:
    """host and port of TCP, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can connect: a Unix socket, or a loopback address."""
        if self.path or self.host == "localhost":
            return True
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False

    def listen(self) -> socket.socket:
        """Return a socket that listens here. Port 0 is a free one. Raises OSError."""
        if self.path:
            with suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.stat(self.path).st_mode) and not _is_answering(self.path):
                    os.unlink(self.path)  # of a process that was killed
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            mask = os.umask(0o177)
            try:
                found.bind(self.path)
            except OSError:
                found.close()
                raise
            finally:
                os.umask(mask)
            found.listen(_BACKLOG)
            return found
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        return socket.create_server((self.host, self.port), family=family, backlog=_BACKLOG)

    def connect(self, timeout_s: float) -> socket.socket:
        """Return a socket that is connected to this address. Raises OSError."""
        if self.path:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            found.settimeout(timeout_s)
            try:
                found.connect(self.path)
            except OSError:
                found.close()
                raise
            return found
        found = socket.create_connection((self.host, self.port), timeout_s)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return found


def parse_address(text: str, name: str) -> Address:
    """Return the address that an option names. Raises ConfigError, with the option's name."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path or len(os.fsencode(path)) > _MAX_PATH_BYTES:
            raise ConfigError(f"{name} must be {ALLOWED}, with a path of 1 to {_MAX_PATH_BYTES} bytes, got {text!r}")
        return Address(path=path)
    match = _TCP.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ConfigError(f"{name} must be {ALLOWED}, got {text!r}")
    return Address(host=match["host"].strip("[]"), port=int(match["port"]))


def parse_reachable(text: str, name: str, *, has_secret: bool) -> Address:
    """Return the address that an option names; without a secret only one of this machine. Raises ConfigError."""
    address = parse_address(text, name)
    if not has_secret and not address.is_local:
        raise ConfigError(
            f"{name} is {address}, which is not an address of this machine only: other machines need transfer_secret_file, as "
            "pages are prompts"
        )
    return address


def _is_answering(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
