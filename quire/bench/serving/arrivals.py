"""Arrival times of requests: seeded processes, in seconds from the start of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quire.base.errors import ConfigError

Process = Literal["auto", "poisson", "fixed", "burst", "trace"]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How requests arrive. Raises ConfigError.

    request_rate     mean requests per second; inf: all at once, or as max_concurrency allows
    process          "poisson" (gamma gaps with burstiness), "fixed" gaps, "burst" of burst_size at once, "trace": as recorded;
                     "auto": the trace's times if it has any and no rate is given, else poisson
    burstiness       shape of the gamma distribution of the gaps: 1 is Poisson, less is burstier, more is more even
    burst_size       requests per burst
    max_concurrency  maximum number of requests in flight; further ones wait in the client. None: no limit
    trace_speed      replay speed of a trace relative to the recording
    """

    request_rate: float = math.inf
    process: Process = "auto"
    burstiness: float = 1.0
    burst_size: int = 8
    max_concurrency: int | None = None
    trace_speed: float = 1.0

    def __post_init__(self) -> None:
        for option, value in (
            ("--request-rate", self.request_rate),
            ("--burstiness", self.burstiness),
            ("--trace-speed", self.trace_speed),
        ):
            if not value > 0 or (math.isinf(value) and option != "--request-rate"):
                raise ConfigError(f"{option} must be a number above 0, got {value}")
        if self.burst_size < 1:
            raise ConfigError(f"--burst-size must be at least 1, got {self.burst_size}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency must be at least 1, got {self.max_concurrency}")
        if self.process in ("fixed", "burst") and math.isinf(self.request_rate):
            raise ConfigError(f"--arrival {self.process} needs --request-rate, which says how many arrive per second")
        if self.process == "trace" and not math.isinf(self.request_rate):
            raise ConfigError("--arrival trace takes its times from the trace: give --trace-speed, not --request-rate")

    def describe(self, has_times: bool) -> str:
        """Return a description; has_times: whether the workload has recorded times."""
        limit = "" if self.max_concurrency is None else f", at most {self.max_concurrency} at a time"
        name = self.resolve(has_times)
        if name == "trace":
            return f"open loop, as recorded at {self.trace_speed:g} times the speed{limit}"
        if math.isinf(self.request_rate):
            return f"closed loop{limit}" if limit else "all at once"
        shape = {
            "fixed": "fixed gaps",
            "burst": f"bursts of {self.burst_size}",
            "poisson": "Poisson" if self.burstiness == 1 else f"gamma gaps, burstiness {self.burstiness:g}",
        }[name]
        return f"open loop, {self.request_rate:g} requests/s, {shape}{limit}"

    def resolve(self, has_times: bool) -> str:
        """Return the process that "auto" selects. Raises ConfigError if a trace is required that has no times."""
        if self.process == "trace" and not has_times:
            raise ConfigError("--arrival trace needs a trace whose rows have timestamps")
        if self.process != "auto":
            return self.process
        return "trace" if has_times and math.isinf(self.request_rate) else "poisson"

    def times(self, num_requests: int, recorded: list[float] | None, seed: int) -> list[float]:
        """Return when each request is due, ascending, the first at 0.

        recorded  times of the workload, in seconds, ascending, or None
        """
        name = self.resolve(recorded is not None)
        if name == "trace" and recorded is not None:
            return [(time - recorded[0]) / self.trace_speed for time in recorded]
        if math.isinf(self.request_rate):
            return [0.0] * num_requests
        if name == "fixed":
            return [index / self.request_rate for index in range(num_requests)]
        if name == "burst":
            return [index // self.burst_size * self.burst_size / self.request_rate for index in range(num_requests)]
        draws = np.random.default_rng([seed, 0xA1]).gamma(
            self.burstiness, 1.0 / (self.request_rate * self.burstiness), num_requests
        )
        times = np.cumsum(draws) - draws[:1]
        return times.tolist()
