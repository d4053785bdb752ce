"""Latency: one batch at a time; the time to its last token, to the first token, and per token after it."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np

from quire.base.errors import ConfigError
from quire.bench.provenance import Provenance, find_provenance
from quire.bench.roofline import needed_bytes
from quire.bench.workload import Workload
from quire.contracts.config import EngineConfig
from quire.engine.llm import LLM
from quire.kernels.peaks import measure_peaks

_PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True)
class Latency:
    """The results of the measured runs, in seconds; no time per output token if there is only one token.

    mbu: memory bandwidth utilisation over whole runs, relative to the bandwidth measured before them.
    """

    avg_latency: float
    latencies: list[float]
    percentiles: dict[str, float]
    median_time_to_first_token: float
    median_time_per_output_token: float | None
    mbu: float
    machine_bytes_per_second: float
    model: str
    dtype: str
    batch_size: int
    input_len: int
    output_len: int
    seed: int
    provenance: Provenance

    def describe(self) -> str:
        """Return the results as readable lines."""
        lines = [f"Avg latency: {self.avg_latency:.4f} seconds ({min(self.latencies):.4f} to {max(self.latencies):.4f})"]
        lines += [f"{percent}% percentile latency: {value:.4f} seconds" for percent, value in self.percentiles.items()]
        lines.append(f"Median time to first token: {self.median_time_to_first_token * 1e3:.2f} ms")
        if self.median_time_per_output_token is not None:
            lines.append(f"Median time per output token: {self.median_time_per_output_token * 1e3:.2f} ms")
        lines.append(f"Weights' MBU: {self.mbu:.3f} of {self.machine_bytes_per_second / 1e9:.1f} GB/s")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the results as JSON."""
        return json.dumps(asdict(self), indent=2)


def measure_latency(
    config: EngineConfig, workload: Workload, num_warm_up: int, num_runs: int, show_progress: bool = False
) -> Latency:
    """Run the batch num_runs times after num_warm_up; every run has its own prompts, so that none is cached."""
    for name, value, least in (("num_iters", num_runs, 1), ("num_iters_warmup", num_warm_up, 0)):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    llm = LLM(replace(config, skip_tokenizer_init=True))
    report = llm.llm_engine.report
    workload.check(report)
    latencies: list[float] = []
    first_s: list[float] = []
    per_token_s: list[float] = []
    machine = measure_peaks(report)
    steps = 0
    for number in _progress(range(num_warm_up + num_runs), show_progress):
        prompts = workload.prompts(report.spec, first=number + 1)
        steps_before = llm.llm_engine.stats.num_steps
        begin = time.perf_counter()
        outputs = llm.generate(prompts, workload.sampling_params(), use_tqdm=False)
        elapsed = time.perf_counter() - begin
        if number < num_warm_up:
            continue
        latencies.append(elapsed)
        steps += llm.llm_engine.stats.num_steps - steps_before
        for output in outputs:
            metrics = output.metrics
            assert metrics is not None
            assert metrics.time_to_first_token_s is not None
            assert metrics.decode_time_s is not None
            first_s.append(metrics.time_to_first_token_s)
            num_later = len(output.outputs[0].token_ids) - 1
            if num_later > 0:
                per_token_s.append(metrics.decode_time_s / num_later)
    llm.close()
    return Latency(
        avg_latency=statistics.mean(latencies),
        latencies=latencies,
        percentiles={str(p): float(np.percentile(latencies, p)) for p in _PERCENTILES},
        median_time_to_first_token=statistics.median(first_s),
        median_time_per_output_token=statistics.median(per_token_s) if per_token_s else None,
        mbu=needed_bytes(report, steps) / sum(latencies) / machine.bytes_per_s,
        machine_bytes_per_second=machine.bytes_per_s,
        model=config.model,
        dtype=report.spec.dtype,
        batch_size=workload.num_prompts,
        input_len=workload.input_len,
        output_len=workload.output_len,
        seed=workload.seed,
        provenance=find_provenance(),
    )


def _progress(numbers: range, is_shown: bool) -> Iterable[int]:
    if not is_shown:
        return numbers
    from tqdm import tqdm

    return tqdm(numbers, desc="Runs", unit="run", dynamic_ncols=True)
