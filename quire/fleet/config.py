"""FleetConfig: every option of a server with several models. ModelEntry: one of its models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.base.errors import ConfigError
from quire.contracts.memory import format_bytes
from quire.serving.config import ApiKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model of a fleet.

    name             by which clients ask for it
    memory_bytes     that its process counts with while it is loaded
    aliases          other names of it
    options          of its `quire serve`, {name: value} as in a file of --config, the model among them
    preload          it is loaded when the server starts
    pinned           it is never unloaded, and loaded when the server starts
    keep_alive_s     it is unloaded after so long without a request; None: only where others need its memory
    start_timeout_s  that its process may take until it is ready
    """

    name: str
    memory_bytes: int
    aliases: tuple[str, ...] = ()
    options: Mapping[str, str | list[str]] = field(default_factory=dict[str, str | list[str]])
    preload: bool = False
    pinned: bool = False
    keep_alive_s: float | None = None
    start_timeout_s: float = 900.0

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ConfigError("name must not be empty")
        if "*" in (self.name, *self.aliases):
            raise ConfigError("name and aliases must not be '*', which stands for any name")
        if self.memory_bytes < 1:
            raise ConfigError(f"memory must be positive, got {self.memory_bytes}")
        if self.keep_alive_s is not None and not 0 <= self.keep_alive_s < float("inf"):
            raise ConfigError(f"keep_alive_s must not be negative, got {self.keep_alive_s:g}")
        if self.keep_alive_s is not None and self.pinned:
            raise ConfigError("keep_alive_s has no effect for a model that is pinned; leave one of them out")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Options of a fleet. Raises ConfigError, naming the option, when one is invalid.

    memory_bytes          budget of all models that are loaded at the same time
    max_waiting_requests  requests that wait for a model to be loaded; over it 503
    max_wait_s            for which a request waits until its model is loaded; over it 503
    swap_after_s          for so long a request waits for a model in use to become idle; then that model gets no new requests
                          until it has made room
    max_backoff_s         the longest pause after a process that failed, before it is started again
    drain_timeout_s       after SIGTERM: time for running requests to end
    log_level             of the processes of models
    """

    models: tuple[ModelEntry, ...]
    memory_bytes: int
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[ApiKey, ...] = ()
    allowed_hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "::1")
    max_waiting_requests: int = 256
    max_wait_s: float = 300.0
    swap_after_s: float = 10.0
    max_backoff_s: float = 60.0
    max_body_bytes: int = 32 << 20
    max_held_body_bytes: int = 512 << 20
    drain_timeout_s: float = 25.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("models must have at least one entry")
        if self.max_waiting_requests < 1:
            raise ConfigError(f"max_waiting_requests must be at least 1, got {self.max_waiting_requests}")
        if not 0 < self.max_wait_s < float("inf"):
            raise ConfigError(f"max_wait_s must be a positive number of seconds, got {self.max_wait_s:g}")
        if not 0 <= self.swap_after_s < float("inf"):
            raise ConfigError(f"swap_after_s must not be negative, got {self.swap_after_s:g}")
        self._check_names()
        self._check_memory()

    @property
    def aliases(self) -> dict[str, str]:
        """Return {alias: name of its model}."""
        return {alias: entry.name for entry in self.models for alias in entry.aliases}

    def _check_names(self) -> None:
        seen: dict[str, str] = {}
        for number, entry in enumerate(self.models):
            for name in (entry.name, *entry.aliases):
                where = f"models[{number}]"
                if name in seen:
                    raise ConfigError(f"{where}: the name {name!r} is taken by {seen[name]}; names and aliases must differ")
                seen[name] = where

    def _check_memory(self) -> None:
        """Refuse models that can never be loaded, because they alone, or with those that are pinned, exceed the budget."""
        budget = format_bytes(self.memory_bytes)
        num_pinned = sum(entry.memory_bytes for entry in self.models if entry.pinned)
        for number, entry in enumerate(self.models):
            where, needed = f"models[{number}] ({entry.name})", format_bytes(entry.memory_bytes)
            if entry.memory_bytes > self.memory_bytes:
                raise ConfigError(
                    f"{where} needs {needed}, but the memory of the fleet is {budget}; raise memory, or give the model less "
                    "with max-model-len, max-num-seqs or kv-cache-memory-bytes"
                )
            others = num_pinned - entry.memory_bytes * entry.pinned
            if entry.memory_bytes + others > self.memory_bytes:
                raise ConfigError(
                    f"{where} needs {needed} and the pinned models {format_bytes(others)} in addition, but the memory of the "
                    f"fleet is {budget}; pin fewer models, or raise memory"
                )
        loaded = sum(entry.memory_bytes for entry in self.models if entry.preload or entry.pinned)
        if loaded > self.memory_bytes:
            raise ConfigError(
                f"the models with preload need {format_bytes(loaded)} together, but the memory of the fleet is {budget}"
            )
