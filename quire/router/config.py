"""RouterConfig: every option of `quire router`. BackendAddress: where a backend listens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from quire.base.errors import ConfigError

Policy = Literal["prefix", "round-robin", "least-loaded"]
POLICIES: tuple[Policy, ...] = ("prefix", "round-robin", "least-loaded")
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class BackendAddress:
    """Where a backend listens. `name` ("host:port") identifies it in logs, metrics and the admin API."""

    host: str
    port: int
    is_tls: bool = False

    @property
    def name(self) -> str:
        """Return host:port, as the Host header has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Return the URL without a path."""
        return f"{'https' if self.is_tls else 'http'}://{self.name}"


def parse_backend(url: str) -> BackendAddress:
    """Return the address that a URL names. Raises ConfigError."""
    form = "a backend must be a URL like http://host:8000 without user, path or query"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError(f"{form}, got {url[:200]!r}") from None
    has_more = parts.path.rstrip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme not in ("http", "https") or not parts.hostname or has_more or port == 0:
        raise ConfigError(f"{form}, got {url[:200]!r}")
    is_tls = parts.scheme == "https"
    return BackendAddress(parts.hostname, port or (443 if is_tls else 80), is_tls)


def parse_aliases(pairs: Sequence[str]) -> dict[str, str]:
    """Return {alias: model} of NAME=MODEL texts. Raises ConfigError."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, separator, model = pair.partition("=")
        if not separator or not name or not model or name in found or name == model:
            raise ConfigError(f"--alias takes NAME=MODEL, each name once and two different names, got {pair[:200]!r}")
        found[name] = model
    chained = sorted(model for model in found.values() if model in found)
    if chained:
        raise ConfigError(f"--alias: the model of an alias must not be an alias itself, got {chained[0]!r}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Options of `quire router`. Raises ConfigError, naming the option, when one is invalid.

    backends            where requests go at the start; more are added by the admin API
    aliases             {name that clients may use: name of a model that a backend serves}
    admin_key           of the admin API; None switches that API off
    backend_key         sent with the router's own questions (health, models, load); clients' keys are passed on unchanged
    allowed_hosts       Host names that are answered; None: those of this machine if host is one of them, else all
    policy              prefix: least predicted time to the first token; the others look at no prompt
    prefix_chunk_bytes  of a prompt that one entry of the prefix index stands for
    max_prefix_chunks   entries for each backend; the least recently used are forgotten
    health_interval_s   between two questions to each backend
    health_timeout_s    for the answer to one
    max_health_failures  failed questions in a row after which a backend is left out
    connect_timeout_s   for a connection to a backend
    idle_timeout_s      without a byte from a backend that answers; the request then fails
    max_retries         other backends that are tried for one request, before its first byte
    retry_ratio         retries for each request over time (the budget), so that failures do not multiply the load
    drain_timeout_s     after SIGTERM: time for running requests to end
    """

    host: str = "127.0.0.1"
    port: int = 8080
    backends: tuple[BackendAddress, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    admin_key: str | None = None
    backend_key: str | None = None
    allowed_hosts: tuple[str, ...] | None = None
    policy: Policy = "prefix"
    prefix_chunk_bytes: int = 256
    max_prefix_chunks: int = 1 << 16
    max_body_bytes: int = 32 * MIB
    max_held_body_bytes: int = 512 * MIB
    health_interval_s: float = 1.0
    health_timeout_s: float = 5.0
    max_health_failures: int = 3
    connect_timeout_s: float = 3.0
    idle_timeout_s: float = 600.0
    max_retries: int = 2
    retry_ratio: float = 0.2
    drain_timeout_s: float = 25.0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        for name in ("prefix_chunk_bytes", "max_prefix_chunks", "max_body_bytes", "max_held_body_bytes", "max_health_failures"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("health_interval_s", "health_timeout_s", "connect_timeout_s", "idle_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be a positive number of seconds, got {getattr(self, name)}")
        if self.max_retries < 0:
            raise ConfigError(f"max_retries must not be negative, got {self.max_retries}")
        if not 0 <= self.retry_ratio <= 1:
            raise ConfigError(f"retry_ratio must be between 0 and 1, got {self.retry_ratio}")
        if not 0 <= self.drain_timeout_s < float("inf"):
            raise ConfigError(f"drain_timeout_s must not be negative, got {self.drain_timeout_s}")
        names = [backend.name for backend in self.backends]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(f"each backend may be given once, got {repeated[0]} twice")
        if self.admin_key is not None and not self.admin_key.strip():
            raise ConfigError("admin_key must not be empty")
        if not self.backends and self.admin_key is None:
            raise ConfigError("give at least one --backend, or an --admin-key so that backends can be added later")
