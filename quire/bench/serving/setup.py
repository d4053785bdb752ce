"""Description and cost of a run, for its report."""

from __future__ import annotations

from dataclasses import dataclass

from quire.bench.serving.client_cost import CpuTimes
from quire.bench.serving.server_lag import LagCounts


@dataclass(frozen=True, slots=True)
class Setup:
    """Description of a run, included in the report as it is.

    machine, commit  of the load generator: its processor with the logical cores; the checkout, None for an installed package
    """

    backend: str
    base_url: str
    endpoint: str
    model: str
    tokenizer: str | None
    dataset: str
    arrival: str
    num_prompts: int
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    ignore_eos: bool
    seed: int
    event_loop: str
    json_parser: str
    quire_version: str
    platform: str
    machine: str
    commit: str | None
    date: str


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of the run: CPU seconds, the event loop's lags in seconds, connections opened.

    server_lag    of the server's event loop, if requested
    engine_steps  of the engine, if known
    """

    cpu: CpuTimes
    lags_s: tuple[float, ...]
    num_connections: int = 0
    server_lag: LagCounts | None = None
    engine_steps: int | None = None
