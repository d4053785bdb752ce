"""The simulator against a real engine on this machine, in the same minutes; skipped on a machine that others use."""

import os

import pytest

from quire import EngineConfig
from quire.bench.serving.arrivals import Arrivals
from quire.bench.serving.serve import ServeOptions, run_serve
from quire.bench.serving.workload import Dataset
from quire.bench.steps import StepsTrial, measure_steps
from quire.contracts.config import SchedulerConfig
from quire.simulate.run import SimulateOptions, simulate

CONFIG = EngineConfig(model="demo", device="cpu", num_threads=1, max_num_seqs=32, num_kv_blocks=2000)
DATASET = Dataset(num_prompts=60, input_len=150, output_len=60, range_ratio=0.5, seed=3)


def is_busy() -> bool:
    """Return whether others compute on this machine now."""
    return os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1)


@pytest.fixture(scope="module")
def record():
    if is_busy():
        pytest.skip(f"others use this machine (load {os.getloadavg()[0]:.1f}): measured times would not be repeated")
    return measure_steps(CONFIG, StepsTrial(seconds=20.0))


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0])
def test_prediction_is_near_the_measurement(record, rate):
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
            scheduler=SchedulerConfig(**record.scheduler, enable_prefix_caching=False),
            times=record.fit(),
            windows=record.shape.windows,
            dataset=DATASET,
            arrivals=arrivals,
        )
    ).report.to_dict()
    assert predicted["completed"] == real["completed"] == 60
    assert predicted["total_output_tokens"] == real["total_output_tokens"]
    assert predicted["output_throughput"] == pytest.approx(real["output_throughput"], rel=0.05)
    for name in ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms"):
        assert predicted[name] == pytest.approx(real[name], rel=0.15), name
