"""Compares `quire simulate` with a server on this machine: measures steps and delivery, then serves and simulates one trace.

    python bench/simulated_load.py TRACE [--rates RATE ...] [--output-json FILE]

The machine has to be idle; it takes three minutes. Ends with status 1 where throughput differs by more than 5 % or a latency by
more than 15 %. The file has the fit and the figures, for tests/unit/simulate/test_recorded_load.py.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from quire import EngineConfig
from quire.bench.delivery import measure_delivery
from quire.bench.serving.arrivals import Arrivals
from quire.bench.serving.serve import ServeOptions, run_serve
from quire.bench.serving.workload import Dataset
from quire.bench.steps import StepsTrial, measure_steps
from quire.planner.record import StepsRecord
from quire.simulate.run import SimulateOptions, simulate

CONFIG = EngineConfig(model="demo", device="cpu", num_threads=1, max_num_seqs=32, num_kv_blocks=2000)
LIMITS = {
    "output_throughput": 0.05,
    **dict.fromkeys(("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms"), 0.15),
}
SCALES = {"input_scale": 0.3, "output_scale": 0.3, "max_input_len": 800, "max_output_len": 200}
RUN_S = 30.0
_START_S = 60.0


@contextmanager
def server() -> Iterator[str]:
    """Yield the URL of a server like CONFIG, without a prefix cache, as no prompt begins like another."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    limits = {
        "--num-threads": 1,
        "--max-num-seqs": CONFIG.max_num_seqs,
        "--num-kv-blocks": CONFIG.num_kv_blocks,
        "--port": port,
    }
    options = [str(word) for pair in limits.items() for word in pair]
    command = [sys.executable, "-m", "quire", "serve", "demo", "--device", "cpu", *options, "--log-level", "error"]
    process = subprocess.Popen([*command, "--no-enable-prefix-caching"], start_new_session=True)
    url, end_s = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    try:
        while True:
            try:
                urllib.request.urlopen(url + "/ready", timeout=10).read()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end_s:
                    raise SystemExit("the server did not start") from None
                time.sleep(0.05)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def predict(record: StepsRecord, dataset: Dataset, rate: float) -> dict[str, float]:
    """Return the simulated figures of a rate."""
    options = SimulateOptions(
        model="demo",
        machine="this machine",
        scheduler=record.scheduler_config(),
        times=record.fit(),
        windows=record.shape.windows,
        dataset=dataset,
        arrivals=Arrivals(request_rate=rate),
        delivery=record.delivery,
    )
    figures = simulate(options).report.to_dict()
    return {name: figures[name] for name in LIMITS}


def measure(url: str, dataset: Dataset, rate: float) -> dict[str, float]:
    """Return what a server does at a rate."""
    load = ServeOptions(
        base_url=url,
        model="demo",
        ignore_eos=True,
        num_warmups=3,
        dataset=dataset,
        arrivals=Arrivals(request_rate=rate),
    )
    return run_serve(load).to_dict()


def run(record: StepsRecord, url: str, dataset: Dataset, rate: float) -> tuple[dict[str, float], bool]:
    """Print what is measured and simulated at a rate; return what was measured, and whether all is within the limits."""
    real, predicted, is_near = measure(url, dataset, rate), predict(record, dataset, rate), True
    for name, limit in LIMITS.items():
        ratio = predicted[name] / real[name]
        is_near &= abs(ratio - 1) <= limit
        print(f"rate {rate:g}  {name:18} measured {real[name]:9.2f}  simulated {predicted[name]:9.2f}  ratio {ratio:.3f}")
    return {name: round(real[name], 3) for name in LIMITS}, is_near


def thinned(values: Sequence[float], number: int) -> list[float]:
    """Return at most `number` quantiles of values."""
    chosen = np.quantile(values, (np.arange(number) + 0.5) / number) if len(values) > number else sorted(values)
    return [float(f"{one:.3g}") for one in chosen]


def main(args: argparse.Namespace) -> int:
    """Measure, compare, write; return the exit status."""
    record = measure_steps(CONFIG, StepsTrial(seconds=15.0))
    measured: list[dict[str, float]] = []
    is_near = True
    with server() as url:
        record = replace(record, delivery=measure_delivery(url, record))
        print(f"{record.fit().describe()}\n{record.delivery.describe()}", flush=True)
        for rate in args.rates:
            dataset = Dataset(name="trace", path=args.trace, num_prompts=round(rate * RUN_S), seed=3, **SCALES)
            figures, is_near_here = run(record, url, dataset, rate)
            measured.append({"rate": rate, **figures})
            is_near &= is_near_here
    if args.output_json is not None:
        fit, delivery = record.fit(), record.delivery
        figures = {
            "provenance": record.provenance,
            "scheduler": record.scheduler,
            "fit": asdict(replace(fit, residuals={name: thinned(ratios, 24) for name, ratios in fit.residuals.items()})),
            "delivery": asdict(
                replace(
                    delivery, delays=delivery.delays[::4], stalls=[(one, thinned(two, 100)) for one, two in delivery.stalls]
                )
            ),
            "measured": measured,
        }
        args.output_json.write_text(json.dumps(figures) + "\n")
    if args.record is not None:
        args.record.write_text(record.to_json())
    return 0 if is_near else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "trace", type=Path, help="CSV with TIMESTAMP,ContextTokens,GeneratedTokens, like the conversations of Azure"
    )
    parser.add_argument("--rates", nargs="+", type=float, default=[5.0, 10.0, 20.0], help="requests a second")
    parser.add_argument("--output-json", type=Path, help="write the fit and what was measured to this file")
    parser.add_argument("--record", type=Path, help="write the whole record of the steps to this file")
    sys.exit(main(parser.parse_args()))
