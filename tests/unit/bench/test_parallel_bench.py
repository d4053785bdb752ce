"""`quire bench parallel`: what is counted, and a short run of it."""

import json

import numpy as np
import pytest

from quire.base.errors import ConfigError
from quire.bench.parallel import figure_of, measure_parallel
from quire.cli.main import main
from quire.kernels.native import load_native


def test_figure_is_of_percentiles_in_microseconds():
    figure = figure_of("barrier", 2, 0, np.arange(1001) * 1000.0)
    assert (figure.least_us, figure.tenth_us, figure.median_us, figure.p90_us, figure.p99_us) == (0, 100, 500, 900, 990)
    assert figure.num_samples == 1001


@pytest.mark.parametrize("ranks, samples, told", [((1,), 200, "ranks"), ((65,), 200, "ranks"), ((2,), 99, "num_samples")])
def test_what_cannot_be_measured_is_refused(ranks, samples, told):
    with pytest.raises(ConfigError, match=f"{told} must be from"):
        measure_parallel(ranks, samples)


@pytest.mark.slow
@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
def test_short_run_writes_a_record(tmp_path, capsys):
    path = tmp_path / "record.json"
    words = ["bench", "parallel", "--ranks", "2", "--num-samples", "100", "--idle", "0.001", "0.01", "--idle-worker", "0.5"]
    assert main([*words, "--output-json", str(path)]) == 0
    record = json.loads(path.read_text())
    found = [(each["operation"], each["num_bytes"], each["idle_s"]) for each in record["figures"]]
    assert found[:3] == [("barrier", 0, 0), ("all_reduce", 8192, 0), ("all_reduce", 65536, 0)]
    assert [(name, idle_s) for name, _, idle_s in found[3:]] == [("message", 0.001), ("message", 0.01)]
    for each in record["figures"]:
        assert 0 < each["least_us"] <= each["tenth_us"] <= each["median_us"] <= each["p90_us"] <= each["p99_us"]
    assert 0 < record["idle_share"] < 0.5
    assert "idle worker" in capsys.readouterr().out
