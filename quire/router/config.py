"""RouterConfig: every option of `quire router`. BackendAddress: where a backend listens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from quire.base.errors import ConfigError
from quire.serving.engine_client.kv_events import check_endpoint

Policy = Literal["prefix", "round-robin", "least-loaded"]
POLICIES: tuple[Policy, ...] = ("prefix", "round-robin", "least-loaded")
MIB = 1 << 20
_KV_TIMES = ("kv_events_silence_s", "tokenize_timeout_s")


@dataclass(frozen=True, slots=True)
class BackendAddress:
    """Where a backend listens. `name` identifies it in logs, metrics and the admin API.

    uds    path of the Unix socket that it listens on, instead of the port
    label  its name; empty: host:port
    """

    host: str
    port: int
    is_tls: bool = False
    uds: str = ""
    label: str = ""

    @property
    def name(self) -> str:
        """Return the label, or else host:port."""
        return self.label or self.authority

    @property
    def authority(self) -> str:
        """Return host:port, as the Host header has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Return the URL without a path."""
        return f"{'https' if self.is_tls else 'http'}://{self.authority}"


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


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """Where an engine publishes its KV events, and where it replays them (None: nowhere)."""

    endpoint: str
    replay_endpoint: str | None = None

    def __post_init__(self) -> None:
        check_endpoint("a KV events endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            check_endpoint("a KV events replay endpoint", self.replay_endpoint)


def parse_kv_events(texts: Sequence[str]) -> dict[str, tuple[KvEventSource, ...]]:
    """Return {name of a backend: its sources} of BACKEND=ENDPOINT[,REPLAY] texts; a backend may have several, one for each of
    its replicas. Raises ConfigError."""
    found: dict[str, tuple[KvEventSource, ...]] = {}
    for text in texts:
        backend, separator, endpoints = text.partition("=")
        endpoint, comma, replay = endpoints.partition(",")
        if not separator or not endpoint or (comma and not replay):
            form = "BACKEND=ENDPOINT[,REPLAY], like http://host:8000=tcp://host:5557,tcp://host:5558"
            raise ConfigError(f"--kv-events takes {form}, got {text[:200]!r}")
        name = parse_backend(backend).name
        found[name] = (*found.get(name, ()), KvEventSource(endpoint, replay or None))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Options of `quire router`. Raises ConfigError, naming the option, when one is invalid.

    backends            where requests go at the start; more are added by the admin API
    aliases             {name that clients may use: name of a model that a backend serves}
    admin_key           of the admin API; None switches that API off
    backend_key         sent with the router's own questions (health, models, load); clients' keys are passed on unchanged
    allowed_hosts       Host names that are answered; None: those of this machine if host is one of them, else all
    enable_page         serve the web page at /
    policy              prefix: least predicted time to the first token; the others look at no prompt
    kv_events           {name of a backend: where it publishes KV events}; of the others the cache is estimated
    kv_events_silence_s  without events from a backend that answers requests, after which it is asked for a replay
    tokenize_timeout_s  for a backend to turn a prompt into tokens, with KV events; after it the estimate decides
    prefix_chunk_bytes  of a prompt that one entry of the prefix index stands for
    max_prefix_chunks   entries for each backend; the least recently used are forgotten
    health_interval_s   between two questions to each backend
    health_timeout_s    for the answer to one
    max_health_failures  failed questions in a row after which a backend is left out
    connect_timeout_s   for a connection to a backend
    idle_timeout_s      without a byte from a backend that answers; the request then fails
    max_retries         other backends that are tried for one request, before its first byte
    max_resumes         how often other backends continue a stream whose backend failed; 0: never
    retry_ratio         retries for each request over time (the budget), so that failures do not multiply the load
    drain_timeout_s     after SIGTERM: time for running requests to end
    adds_backends       this process adds backends by itself, so none need to be given
    """

    host: str = "127.0.0.1"
    port: int = 8080
    backends: tuple[BackendAddress, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    kv_events: dict[str, tuple[KvEventSource, ...]] = field(default_factory=dict[str, tuple[KvEventSource, ...]])
    kv_events_silence_s: float = 10.0
    tokenize_timeout_s: float = 0.05
    admin_key: str | None = None
    backend_key: str | None = None
    allowed_hosts: tuple[str, ...] | None = None
    enable_page: bool = True
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
    max_resumes: int = 3
    retry_ratio: float = 0.2
    drain_timeout_s: float = 25.0
    adds_backends: bool = False

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        for name in ("prefix_chunk_bytes", "max_prefix_chunks", "max_body_bytes", "max_held_body_bytes", "max_health_failures"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("health_interval_s", "health_timeout_s", "connect_timeout_s", "idle_timeout_s", *_KV_TIMES):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be a positive number of seconds, got {getattr(self, name)}")
        unknown = sorted(set(self.kv_events) - {backend.name for backend in self.backends})
        if unknown:
            raise ConfigError(f"kv_events: {unknown[0]} is none of the backends")
        if self.kv_events and self.policy != "prefix":
            raise ConfigError(f"kv_events are of use for the policy prefix only, got {self.policy!r}")
        if self.max_retries < 0:
            raise ConfigError(f"max_retries must not be negative, got {self.max_retries}")
        if self.max_resumes < 0:
            raise ConfigError(f"max_resumes must not be negative, got {self.max_resumes}")
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
        if not self.backends and self.admin_key is None and not self.adds_backends:
            raise ConfigError("give at least one --backend, or an --admin-key so that backends can be added later")
