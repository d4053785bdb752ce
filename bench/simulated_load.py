"""Compares `quire simulate` with the engine on this machine: measures the times of steps, then runs and simulates one load.

    python bench/simulated_load.py [RATE ...]

The machine has to be idle; it takes four minutes. Ends with status 1 where throughput differs by more than 5 % or
a latency by more than 15 %.
"""

from __future__ import annotations

import sys

from quire import EngineConfig
from quire.bench.serving.arrivals import Arrivals
from quire.bench.serving.serve import ServeOptions, run_serve
from quire.bench.serving.workload import Dataset
from quire.bench.steps import StepsTrial, measure_steps
from quire.simulate.run import SimulateOptions, simulate

CONFIG = EngineConfig(model="demo", device="cpu", num_threads=1, max_num_seqs=32, num_kv_blocks=2000)
DATASET = Dataset(num_prompts=100, input_len=150, output_len=60, range_ratio=0.5, seed=3)
LIMITS = {
    "output_throughput": 0.05,
    **dict.fromkeys(("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms"), 0.15),
}


def main(rates: list[float]) -> int:
    """Print measured and simulated figures for each rate; return the exit status."""
    record = measure_steps(CONFIG, StepsTrial(seconds=15.0))
    is_near = True
    for rate in rates:
        arrivals = Arrivals(request_rate=rate)
        real = run_serve(
            ServeOptions(
                engine=CONFIG, model="demo", ignore_eos=True, num_warmups=2, vocab_size=1000, dataset=DATASET, arrivals=arrivals
            )
        ).to_dict()
        predicted = simulate(
            SimulateOptions(
                model="demo",
                machine="this machine",
                scheduler=record.scheduler_config(),
                times=record.fit(),
                windows=record.shape.windows,
                dataset=DATASET,
                arrivals=arrivals,
            )
        ).report.to_dict()
        for name, limit in LIMITS.items():
            ratio = predicted[name] / real[name]
            is_near &= abs(ratio - 1) <= limit
            print(f"rate {rate:g}  {name:18} measured {real[name]:9.2f}  simulated {predicted[name]:9.2f}  ratio {ratio:.3f}")
    return 0 if is_near else 1


if __name__ == "__main__":
    sys.exit(main([float(rate) for rate in sys.argv[1:]] or [1.0, 2.0, 5.0]))
