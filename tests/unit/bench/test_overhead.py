"""`quire bench overhead`: a real server compared with LLM.generate, with a model that takes no time."""

import json
import sys

import pytest

from quire.base.errors import WorkerError
from quire.bench.overhead import measure_overhead
from quire.bench.workload import Workload
from quire.cli.main import main
from quire.contracts.config import EngineConfig


@pytest.mark.slow
def test_figures_are_those_of_the_rounds(capsys, tiny_model, tmp_path):
    path = tmp_path / "figures.json"
    options = ("--num-prompts", "3", "--input-len", "9", "--output-len", "4", "--num-iters", "2", "--output-json", str(path))
    engine = ("--num-kv-blocks", "40", "--no-enable-prefix-caching", "--dtype", "float32", "--max-num-seqs", "4")
    assert main(["bench", "overhead", "--model", str(tiny_model), *options, *engine]) == 0
    figures = json.loads(path.read_text())
    ratios = [one["served"] / one["direct"] for one in figures["rounds"]]
    assert len(ratios) == 2
    assert figures["ratio"] == pytest.approx(sum(ratios) / 2)
    assert (figures["least_ratio"], figures["greatest_ratio"]) == pytest.approx((min(ratios), max(ratios)))
    assert {"--num-kv-blocks=40", "--no-enable-prefix-caching", "--max-num-seqs=4"} <= set(figures["server"])
    assert "median ratio" in capsys.readouterr().out


def test_timelines_are_measured_round_by_round(capsys, tiny_model, tmp_path):
    path = tmp_path / "figures.json"
    options = ("--num-prompts", "2", "--input-len", "9", "--output-len", "4", "--num-iters", "2", "--output-json", str(path))
    engine = ("--num-kv-blocks", "40", "--dtype", "float32", "--max-num-seqs", "4")
    assert main(["bench", "overhead", "--timelines", "--model", str(tiny_model), *options, *engine]) == 0
    figures = json.loads(path.read_text())
    assert len(figures["ratios"]) == 2
    assert figures["cost"] == pytest.approx(1 - sum(figures["ratios"]) / 2)
    assert "Timelines cost" in capsys.readouterr().out


def test_server_that_cannot_start_is_told(tiny_model):
    config, workload = EngineConfig(model=str(tiny_model)), Workload(1, 4, 2, 0, True, 0.0)
    with pytest.raises(WorkerError, match="status 7"):
        measure_overhead(config, workload, [sys.executable, "-c", "import sys; sys.exit(7)"], 9, 1)
