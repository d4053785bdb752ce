"""Options of what happens to simulated replicas: prefill and decode apart, failures, and the autoscaler."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from quire.base.errors import ConfigError
from quire.router.autoscale import Limits, Objectives

MAX_RETRIES, MAX_RESUMES, RETRY_RATIO = 2, 3, 0.2
"""The router's defaults: other replicas for a request before its first token, and for one whose stream broke; retries for each
request over time."""


@dataclass(frozen=True, slots=True)
class HandOverOptions:
    """Prefill replicas, and the links over which they hand over KV pages. Raises ConfigError.

    num_prefill    replicas that compute prompts, next to those that decode
    min_tokens     prompts with fewer uncached tokens are computed where they are decoded
    bytes_per_s    of each prefill replica's link, latency_s: of each hand-over
    page_bytes     of a KV block of all layers
    """

    num_prefill: int
    page_bytes: float
    min_tokens: int = 256
    bytes_per_s: float = 10e9
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_prefill < 1:
            raise ConfigError(f"--prefill-replicas must be an integer >= 0, got {self.num_prefill}")
        if self.min_tokens < 1:
            raise ConfigError(f"--prefill-min-tokens must be an integer >= 1, got {self.min_tokens}")
        if not 0 < self.bytes_per_s < math.inf:
            raise ConfigError(f"--link-gb-per-s must be a number above 0, got {self.bytes_per_s / 1e9:g}")
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError(f"--link-latency-ms must be a number of at least 0, got {self.latency_s * 1e3:g}")


@dataclass(frozen=True, slots=True)
class Failure:
    """A replica's process ends at a time, and starts again restart_s later with empty caches; None: it stays away.

    replica  counted from 0: those that decode or do both come first, then those for prefill
    """

    replica: int
    at_s: float
    restart_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Failure:
        """Return the failure of a text like "0:30" or "0:30:10". Raises ConfigError."""
        parts = text.split(":")
        try:
            replica, times = int(parts[0]), [float(part) for part in parts[1:]]
        except ValueError:
            replica, times = -1, []
        if replica < 0 or len(times) not in (1, 2) or not all(0 <= one < math.inf for one in times):
            raise ConfigError(
                "--fail takes REPLICA:AT_S or REPLICA:AT_S:RESTART_S, a replica from 0 on and seconds of at least 0, got "
                f"{text!r}"
            )
        return cls(replica, times[0], times[1] if len(times) == 2 else None)


@dataclass(frozen=True, slots=True)
class AutoscaleOptions:
    """The autoscaler, `decide` of quire.router.autoscale. Raises ConfigError.

    interval_s  between two decisions
    start_s     from the start of a replica until it is ready
    tpot_s      objective of the decode role; None: it is always met
    """

    objectives: Objectives
    limits: Limits = field(default_factory=Limits)
    interval_s: float = 15.0
    start_s: float = 60.0
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.interval_s < math.inf:
            raise ConfigError(f"--autoscale-interval must be a number of seconds above 0, got {self.interval_s:g}")
        if not 0 <= self.start_s < math.inf:
            raise ConfigError(f"--replica-start must be a number of seconds of at least 0, got {self.start_s:g}")

    @staticmethod
    def parse_range(text: str) -> tuple[int, int]:
        """Return the least and the most replicas of each role of a text like "1:8". Raises ConfigError."""
        least, _, most = text.partition(":")
        try:
            found = int(least), int(most)
        except ValueError:
            found = (0, 0)
        if not 1 <= found[0] <= found[1]:
            raise ConfigError(f"--autoscale takes MIN:MAX replicas of each role, 1 <= MIN <= MAX, got {text!r}")
        return found
