"""ServerConfig: every option of the server; the engine's own are in EngineConfig."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from quire.base.errors import ConfigError
from quire.contracts.sampling_params import MAX_CHOICES
from quire.text.parsing.formats import REASONING_FORMATS, TOOL_FORMATS

MIB = 1 << 20
MAX_NAME_LENGTH = 512  # of a model name in a request
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s@]+")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_LABEL = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")
_OWN_LABELS = [
    "block_size",
    "cache_dtype",
    "class",
    "code",
    "enable_prefix_caching",
    "engine",
    "finished_reason",
    "format",
    "layer",
    "le",
    "max_lora",
    "model_name",
    "num_kv_blocks",
    "operation",
    "outcome",
    "param",
    "peer",
    "phase",
    "position",
    "quantile",
    "rank",
    "reason",
    "replica",
    "route",
    "running_lora_adapters",
    "source",
    "stage",
    "state",
    "tier",
    "waiting_lora_adapters",
]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One client of the server.

    name                 in logs, and as the owner of files and batches
    sha256               of the key; the key itself is not stored
    max_concurrent       requests in flight at once; None for no limit
    requests_per_minute  None for no limit
    tokens_per_minute    prompt and output tokens; None for no limit
    weight               share of the engine relative to other keys under load
    max_stored_files     files at a time, including outputs of batches; None for the server's limit
    max_stored_bytes     of these files; likewise
    max_stored_batches   batches at a time, including those of the last 30 days; likewise
    may_use_interactive  its requests may ask for the service tier "priority"; otherwise they get "default", and the answer says
                         so
    """

    name: str
    sha256: bytes
    max_concurrent: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    weight: float = 1.0
    max_stored_files: int | None = None
    max_stored_bytes: int | None = None
    max_stored_batches: int | None = None
    is_admin: bool = False
    may_use_interactive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of `quire serve`. Raises ConfigError, naming the option, when one is invalid.

    uds                   path of a Unix socket to listen on, instead of host and port
    root_path             prefix of all paths at the proxy in front, such as /llm; requests may come with it or without
    ssl_keyfile           private key and ssl_certfile certificate chain, both PEM: with them the server speaks HTTPS only
    access_log            a log line for each request
    api_keys              none: everybody may ask; the server then only answers to known Host names
    served_model_names    what clients may call the model; the first is what answers say; empty: the name of the checkpoint
    lora_modules          (name, path) of the LoRA adapters that are loaded at the start; names are models for clients
    allowed_origins       origins that browsers may call from; none by default
    allowed_hosts         Host headers that are answered while there are no keys (against DNS rebinding)
    data_dir              files, batches and stored responses; None keeps them in memory, and says so
    cache_secret_file     the secret that the cache salts of keys are made with; made where it does not exist. None: a file in
                          kv_disk_dir, or without a disk tier a new secret at each start
    max_prompt_characters  of one prompt; None: 16 for each token of the context, but a million at least
    max_held_body_bytes   of all bodies that are arriving or being answered, of uploads what is in the memory; over it 503, but
                          for small ones
    max_stored_files      of one key, what its batches have written included; over it uploads are refused
    max_stored_bytes      of these files
    max_stored_batches    of one key, including ended ones until they expire after 30 days; beyond it new ones are refused
    max_queued_requests   sequences (n counts) that may wait or run; over it 503
    max_queued_tokens     prompt tokens that may wait; over it 503
    max_queue_wait_s      a request whose estimated wait is longer is refused with 503
    default_timeout_s     deadline of requests that state none
    drain_grace_s         after SIGTERM: time in which the server still listens and answers new work with 503, for load
                          balancers
    drain_timeout_s       then: time for running requests to end
    watchdog_timeout_s    an engine without progress for this long is killed and restarted
    max_restarts          restarts within restart_window_s before the server gives up and exits
    tool_call_parser      a format of quire.text.parsing, "auto" (from the chat template) or "none"
    reasoning_parser      likewise
    strict                refuse unknown fields of a body instead of naming them in x-quire-ignored-params
    slo_ttft_s            a request within all given thresholds counts as SLO-met (goodput)
    metric_labels         names and values that every metric has in addition to its own
    max_timelines         ended requests whose timelines are kept, for `quire explain`; 0: none, and nothing is recorded
    kv_events_endpoint    where events of KV blocks are published; None: nowhere
    kv_events_replay_endpoint  where subscribers ask for events that they missed
    kv_events_encoding    of an event: an array, as in older versions of vLLM, or a map, as in later ones and in SGLang
    metrics_names         prefix of the metrics: quire, vllm (what endpoint pickers read), or both
    replica_id            begins the random part of the ids of stored responses, conversations, files and batches, so that a
                          router knows which server keeps them; empty: none
    keep_alive_comment_s  a stream that is silent for so long gets a comment, so that no proxy takes it for dead
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    root_path: str = ""
    ssl_keyfile: Path | None = None
    ssl_certfile: Path | None = None
    access_log: bool = True
    api_keys: tuple[ApiKey, ...] = ()
    served_model_names: tuple[str, ...] = ()
    lora_modules: tuple[tuple[str, str], ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "::1")
    data_dir: Path | None = None
    cache_secret_file: Path | None = None
    max_body_bytes: int = 32 * MIB
    max_prompt_characters: int | None = None
    max_held_body_bytes: int = 512 * MIB
    max_file_bytes: int = 200 * MIB
    max_stored_files: int = 10_000
    max_stored_bytes: int = 16 << 30
    max_stored_batches: int = 10_000
    max_n: int = 16
    max_queued_requests: int = 1024
    max_queued_tokens: int = 2_000_000
    max_queue_wait_s: float = 60.0
    default_timeout_s: float = 600.0
    keep_alive_comment_s: float = 10.0
    slow_reader_bytes: int = 256 << 10
    slow_reader_s: float = 30.0
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    drain_grace_s: float = 0.0
    drain_timeout_s: float = 25.0
    watchdog_timeout_s: float = 60.0
    start_timeout_s: float = 900.0
    max_restarts: int = 5
    restart_window_s: float = 600.0
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    enable_page: bool = True
    enable_metrics: bool = True
    strict: bool = False
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_e2e_s: float | None = None
    otlp_endpoint: str | None = None
    max_timelines: int = 256
    log_format: str = "text"
    kv_events_endpoint: str | None = None
    kv_events_replay_endpoint: str | None = None
    kv_events_encoding: Literal["array", "map"] = "array"
    metrics_names: str = "quire"
    replica_id: str = ""
    metric_labels: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 to 65535, got {self.port}")
        for name in (
            *("max_body_bytes", "max_file_bytes", "max_stored_files", "max_stored_bytes", "max_stored_batches", "max_n"),
            *("max_queued_requests", "max_queued_tokens"),
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_n > MAX_CHOICES:
            raise ConfigError(f"max_n must be at most {MAX_CHOICES}, got {self.max_n}")
        if self.max_held_body_bytes < self.max_body_bytes:
            raise ConfigError(
                f"max_held_body_bytes must be at least max_body_bytes, {self.max_body_bytes}, got {self.max_held_body_bytes}"
            )
        if self.max_prompt_characters is not None and self.max_prompt_characters < 1:
            raise ConfigError(f"max_prompt_characters must be at least 1, got {self.max_prompt_characters}")
        for name in ("drain_grace_s", "drain_timeout_s", "max_restarts", "max_timelines"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in (
            "max_queue_wait_s",
            "default_timeout_s",
            "keep_alive_comment_s",
            "slow_reader_bytes",
            "slow_reader_s",
            "head_timeout_s",
            "body_timeout_s",
            "watchdog_timeout_s",
            "start_timeout_s",
            "restart_window_s",
            "slo_ttft_s",
            "slo_tpot_s",
            "slo_e2e_s",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value}")
        self._check_names()
        self._check_parsers()
        for name in self.metric_labels:
            if not _LABEL.fullmatch(name) or name in _OWN_LABELS:
                raise ConfigError(
                    f"metric_labels: {name!r} must have letters, digits and _ and begin with a letter, and not be one of "
                    f"{', '.join(_OWN_LABELS)}, which metrics have already"
                )
        if self.log_format not in ("text", "json"):
            raise ConfigError(f"log_format must be 'text' or 'json', got {self.log_format!r}")
        if self.kv_events_endpoint is None and self.kv_events_replay_endpoint is not None:
            raise ConfigError("kv_events_replay_endpoint needs kv_events_endpoint")
        if self.kv_events_encoding not in ("array", "map"):
            raise ConfigError(f"kv_events_encoding must be 'array' or 'map', got {self.kv_events_encoding!r}")
        if self.metrics_names not in ("quire", "vllm", "both"):
            raise ConfigError(f"metrics_names must be 'quire', 'vllm' or 'both', got {self.metrics_names!r}")
        if not re.fullmatch("([0-9a-z]{4,8})?", self.replica_id):
            raise ConfigError(f"replica_id must be 4 to 8 of the characters 0-9 and a-z, got {self.replica_id[:100]!r}")
        if len({key.name for key in self.api_keys}) < len(self.api_keys):
            raise ConfigError("api_keys: two keys have the same name")

    def _check_names(self) -> None:
        if not self.host.strip():
            raise ConfigError(f"host must not be empty, got {self.host!r}; 0.0.0.0 is every address of this machine")
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(f"root_path must be like /llm, without a slash at the end, got {self.root_path[:100]!r}")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            missing = "ssl_keyfile" if self.ssl_keyfile is None else "ssl_certfile"
            raise ConfigError(f"ssl_keyfile and ssl_certfile belong together, and {missing} is not given")
        for name in self.served_model_names:
            if not name.strip() or not name.isprintable() or len(name) > MAX_NAME_LENGTH:
                raise ConfigError(
                    f"served_model_names must be printable text of 1 to {MAX_NAME_LENGTH} characters, got {name[:100]!r}; "
                    "leave it out for the name of the checkpoint"
                )
        names = [name for name, _ in self.lora_modules]
        for name in names:
            if names.count(name) > 1 or name in self.served_model_names:
                raise ConfigError(f"lora_modules: the name {name[:100]!r} is given twice, or is that of the model")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"allowed_origins must be like https://example.com, without a path, or *, got {origin!r}")
        if not all(host.strip() for host in self.allowed_hosts):
            raise ConfigError("allowed_hosts must not be empty text")

    def _check_parsers(self) -> None:
        for option, table in (("tool_call_parser", TOOL_FORMATS), ("reasoning_parser", REASONING_FORMATS)):
            name = getattr(self, option)
            if name not in ("auto", "none", *table):
                raise ConfigError(f"{option} {name!r} is not known; allowed are auto, none, {', '.join(sorted(table))}")

    @property
    def records_timelines(self) -> bool:
        """Whether the engine records what happens to requests: for `quire explain`, and for traces."""
        return self.max_timelines > 0 or self.otlp_endpoint is not None

    def weight_of(self, owner: str) -> float:
        """Return the weight of an owner."""
        return next((key.weight for key in self.api_keys if key.name == owner), 1.0)

    def max_batches_of(self, owner: str) -> int:
        """Return how many batches an owner may have."""
        own = next((key.max_stored_batches for key in self.api_keys if key.name == owner), None)
        return self.max_stored_batches if own is None else own

    def stored_limits(self, owner: str) -> tuple[int, int]:
        """Return how many files an owner may store, and how many bytes."""
        key = next((key for key in self.api_keys if key.name == owner), None)
        own = (None, None) if key is None else (key.max_stored_files, key.max_stored_bytes)
        return (
            self.max_stored_files if own[0] is None else own[0],
            self.max_stored_bytes if own[1] is None else own[1],
        )
