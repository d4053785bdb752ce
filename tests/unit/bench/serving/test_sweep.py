"""Sweeps: which arrivals each run has, the points of their figures, and the page."""

import json
import math
import random
from xml.etree import ElementTree

import pytest

from quire.base.errors import ConfigError
from quire.bench.serving.arrivals import Arrivals
from quire.bench.serving.html_report import render_sweep
from quire.bench.serving.metrics import Goals
from quire.bench.serving.sweep import Sweep, run_sweep
from quire.bench.serving.workload import Dataset
from quire.contracts.scheduler_config import SchedulerConfig
from quire.simulate.run import SimulateOptions, simulate


class PlainTime:
    request_s = 0.0

    def mean_s(self, work):
        return 0.010 + 0.001 * work.num_tokens

    def draw_ratio(self, work, rng: random.Random):
        return 1.0


def run_one(arrivals, number):
    options = SimulateOptions(
        model="plain",
        machine="by hand",
        scheduler=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, block_size=16, num_kv_blocks=200
        ),
        times=PlainTime(),
        windows=(None,),
        dataset=Dataset(num_prompts=32, input_len=1, output_len=11, seed=number),
        arrivals=arrivals,
        goals=Goals.parse(["tpot:12.5"]),
    )
    return simulate(options).report


def test_points_have_the_speeds_of_the_runs():
    result = run_sweep(Sweep.parse("concurrency:1,4"), Arrivals(), run_one)
    alone, four = result.points()
    assert alone.tokens_per_s_per_user == pytest.approx(1 / 0.011)
    assert four.tokens_per_s_per_user == pytest.approx(1 / 0.014)
    assert alone.output_tokens_per_s == pytest.approx(1 / 0.011)
    assert four.output_tokens_per_s == pytest.approx(4 / 0.014)
    assert alone.requests_per_minute == pytest.approx(60 / 0.121)
    assert alone.input_tokens_per_s == pytest.approx(alone.requests_per_minute / 60)
    assert alone.good_requests_per_minute == pytest.approx(alone.requests_per_minute)
    assert four.good_requests_per_minute == 0
    assert alone.median_ttft_ms == pytest.approx(11)


def test_rates_are_poisson_arrivals():
    sweep = Sweep.parse("rate:2,40")
    assert sweep.arrivals(Arrivals(max_concurrency=3), 2.0) == Arrivals(2.0, "poisson", max_concurrency=3)
    slow, fast = run_sweep(sweep, Arrivals(), run_one).points()
    assert fast.output_tokens_per_s > 5 * slow.output_tokens_per_s
    assert fast.tokens_per_s_per_user < slow.tokens_per_s_per_user


def test_concurrency_is_a_closed_loop_also_of_a_trace():
    arrivals = Sweep.parse("concurrency:4").arrivals(Arrivals(), 4.0)
    assert arrivals.times(3, [0.0, 5.0, 9.0], 0) == [0.0, 0.0, 0.0]
    assert arrivals.max_concurrency == 4
    assert math.isinf(arrivals.request_rate)


def test_result_is_written_as_table_json_and_page():
    result = run_sweep(Sweep.parse("concurrency:1,2,8"), Arrivals(), run_one)
    assert result.describe().splitlines()[0].split()[:2] == ["concurrency", "users"]
    assert len(result.describe().splitlines()) == 4
    figures = json.loads(result.to_json())
    assert [point["value"] for point in figures["points"]] == [1, 2, 8]
    assert len(figures["runs"]) == 3
    page = render_sweep(result)
    body = page[page.index("<main>") : page.index("</main>") + len("</main>")]
    assert len(ElementTree.fromstring(body).findall(".//figure")) == 5


@pytest.mark.parametrize("text", ["", "users:1,2", "rate:", "rate:0,1", "rate:2,1", "concurrency:1.5", "rate:1,x", "rate:inf"])
def test_wrong_sweeps_are_refused(text):
    with pytest.raises(ConfigError, match="--sweep takes concurrency"):
        Sweep.parse(text)


@pytest.mark.parametrize(
    "arrivals, message",
    [
        (Arrivals(request_rate=3.0), "--request-rate must be left out with --sweep, got 3"),
        (Arrivals(max_concurrency=3), "--max-concurrency must be left out with --sweep concurrency, got 3"),
        (Arrivals(process="poisson"), "--arrival must be auto with --sweep, got 'poisson'"),
    ],
)
def test_arrivals_that_say_what_is_varied_are_refused(arrivals, message):
    with pytest.raises(ConfigError, match=message):
        run_sweep(Sweep.parse("concurrency:1,2"), arrivals, run_one)
