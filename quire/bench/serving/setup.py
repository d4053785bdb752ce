"""What a run was, and what it cost, for its report."""

from __future__ import annotations

from dataclasses import dataclass

from quire.bench.serving.client_cost import CpuTimes


@dataclass(frozen=True, slots=True)
class Setup:
    """What was run, in words and numbers that go into the report as they are."""

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
    date: str


@dataclass(frozen=True, slots=True)
class Cost:
    """What the run cost: processor seconds, the event loop's lags in seconds, connections opened."""

    cpu: CpuTimes
    lags_s: tuple[float, ...]
    num_connections: int = 0
